"""Look at stores in a browser: the facts behind every view, and the server that gives them.

In: folders, perhaps a config and tokenizers.  Out: JSON on a loopback address, read-only.
Promise: nothing is written; every answer is bounded, whatever the store; stores are opened when
they are asked for.
Not here: the terminal (cli), what a page looks like (the folder `page`).

    decoding, batch      what the terminal shows too: tokenizers by name, the batch of a step
    words, view          ids -> what each token adds to the text
    shelf, opened        folders -> stores that are open
    overview, documents, search, plans, steps, origin, checking    a store -> facts for one view
    query, api           a request's numbers, checked; the table of addresses
    web, serve           the only files that know Starlette and uvicorn
"""

from __future__ import annotations
