"""The guarantees as tests, for your own sources, tokenizers, templates, packers and loaders.

sources.py      exact resume, and an account of every row, of documents and of conversations
tokenizers.py   batches equal single texts, and text is never structure; a chat template trains the
                assistant's words and their end, and nothing else
packing.py      rows cover the examples, and pack plans add up
stores.py       stores of documents and of conversations, and small ones to try things on
sampling.py     orders are bijections, ranks a cover
loading.py      one order on any ranks, exact resume, exclusions

Import the module you need: `from shardmill.testing.sources import assert_resumes_exactly`. Most
need hypothesis: `pip install 'shardmill[dev]'`. docs/testing.md has an example of each kind.
"""
