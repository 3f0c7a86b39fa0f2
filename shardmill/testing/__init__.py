"""The laws, tiny corpora and strategies, for your own sources, tokenizers and stores.

stores.py      laws 2 and 3, and small stores to try things on
sources.py     exact resume, and the account of every row
tokenizers.py  batches equal single texts, and text is never structure
sampling.py    orders are bijections, ranks a cover, mixtures keep their shares
spaces.py      token spaces equal the files behind one another
hub.py         a Hugging Face hub on loopback, with faults to order
"""
