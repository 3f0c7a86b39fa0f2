"""The laws, tiny corpora and strategies, for your own sources, templates, packers and tokenizers.

sources.py      exact resume, and the account of every row, of documents and of conversations
tokenizers.py   batches equal single texts, and text is never structure
templates.py    a chat template trains the assistant's words and their end, and nothing else
packing.py      rows cover the examples; the laws of pack plans
packed.py       packed shards train what their sequences train
stores.py       laws 2 and 3, and small stores to try things on
chat_stores.py  the same for stores of conversations
spaces.py       token spaces equal the files behind one another
sampling.py     orders are bijections, ranks a cover, mixtures keep their shares
loading.py      one order on any ranks, and exact resume
exclusion.py    what is excluded changes only the excluded places
streaming.py    streams of documents go on exactly
hub.py          a Hugging Face hub on loopback, with faults to order
s3.py           an S3 server on loopback, with faults to order

Import the module you need: `from shardmill.testing.sources import assert_resumes_exactly`. Most
need hypothesis, `s3` moto too: `pip install 'shardmill[dev]'`. docs/testing.md has an example of
each kind.
"""

__all__ = [
    "chat_stores",
    "exclusion",
    "hub",
    "loading",
    "packed",
    "packing",
    "s3",
    "sampling",
    "sources",
    "spaces",
    "stores",
    "streaming",
    "templates",
    "tokenizers",
]
