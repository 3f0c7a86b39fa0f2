"""`shardmill view`: look at stores in a browser."""

from __future__ import annotations

import sys
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shardmill.cli.options import DataConfigFile, Special, parse_special
from shardmill.errors import MissingExtraError, OptionError, TokenizerError
from shardmill.inspect.stores import Shelf, Tokenizers, find_stores
from shardmill.loading.config import DataConfig, meant_split, read_config


@dataclass(frozen=True, kw_only=True)
class ViewCommand:
    """It reads, and writes nothing; on 127.0.0.1 only this machine reaches it.

    Prints the address, and answers until Ctrl-C.

    Example: shardmill view store chats --tokenizer spm.model

    Exit 0: stopped with Ctrl-C. Exit 2: a mistake in the call, or an address that is taken.
    """

    folders: Annotated[list[Path] | None, "FOLDERS", "Stores, or folders with stores in them."] = (
        None
    )
    config: DataConfigFile = None
    tokenizer: Annotated[
        list[str] | None, "A store's tokenizer, once for each; without one ids are shown."
    ] = None
    special: Special = None
    inputs: Annotated[
        list[str] | None,
        "--input",
        "What stores were built from, to show which file and row a token came from: a file, folder "
        "or glob, or STORE=FOLDER for one store.",
    ] = None
    host: Annotated[str, "The address to listen on."] = "127.0.0.1"
    port: Annotated[int, "0: any that is free."] = 0
    open_page: Annotated[bool, "--open/--no-open", "Open it in a browser."] = False

    def run(self) -> None:
        from shardmill.inspect.api import Desk
        from shardmill.inspect.server import is_loopback, open_server

        if not 0 <= self.port < 2**16:
            raise OptionError(f"--port {self.port}: wanted 0 to 65535")
        config = None if self.config is None else read_config(self.config)
        if not self.folders and config is None:
            raise OptionError("nothing to look at: name a store, a folder with stores, or --config")
        stores = find_stores([*(self.folders or []), *_stores_of(config)])
        desk = Desk(Shelf(stores, _tokenizers(self, config)), config, self.inputs or ())
        with suppress(KeyboardInterrupt), open_server(desk, self.host, self.port) as server:
            if not is_loopback(self.host):
                print(
                    f"shardmill: --host {self.host}: everyone who reaches this address can read "
                    "the data; there is no password",
                    file=sys.stderr,
                )
            print(server.url, flush=True)
            if self.open_page:
                webbrowser.open(server.url)
            server.run()
        print("shardmill: stopped", file=sys.stderr)


def _stores_of(config: DataConfig | None) -> list[Path]:
    """The stores of a mixture; its folders of bare tokens are not shown."""
    if config is None:
        return []
    found = [meant_split(one.path, one.split or config.split) for one in config.sources]
    return [entry[0].folder for entry in found if entry is not None]


def _tokenizers(options: ViewCommand, config: DataConfig | None) -> Tokenizers:
    """Those that were named, else the config's if it can be opened."""
    names, special = options.tokenizer or [], parse_special(options.special)
    if names or config is None or config.tokenizer_path is None:
        return Tokenizers(names, special)
    try:
        return Tokenizers([config.tokenizer_path], special)
    except (TokenizerError, MissingExtraError) as error:
        print(f"shardmill: tokenizer_path: {error}", file=sys.stderr)
        return Tokenizers([], None)
