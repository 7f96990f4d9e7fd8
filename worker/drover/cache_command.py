"""`drover cache`: looks into a worker's folder of weights, checks it, fills it from a model, empties it.

Works beside running workers. It stands above worker and coordinator because filling takes both: the coordinator's
knowledge of model files, and the worker's of its folder.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from drover import logs
from drover.errors import DroverError
from drover.sizes import format_size, parse_size
from drover.worker.__main__ import weights_folder

app = typer.Typer(help="Look after a worker's weight cache: list, check, fill, empty.", no_args_is_help=True)

Folder = Annotated[
    Path | None, typer.Option("--cache-dir", help="As for the worker; by default where llama.cpp keeps its own.")
]


@app.command()
def ls(cache_dir: Folder = None) -> None:
    """List what is kept, the most recently used first."""
    from drover.worker import entry
    from drover.worker.store import Store

    store = Store(_existing(cache_dir))
    rows = store.rows()
    if rows:
        print(f"{'hash':16}  {'size':>10}  {'last used':16}  {'SHA-256':16}  in use")
    for row in reversed(rows):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.used))
        known = (*entry.known(store.folder, row.key), "")[0]
        in_use = "yes" if store.in_use(row.key) else "no"
        print(f"{row.key:016x}  {format_size(row.size):>10}  {used}  {known[:16] or '-':16}  {in_use}")
    for key in store.shared_keys():
        print(f"{key:016x}  kept for nobody: two tensors have this hash")
    print(f"{len(rows)} tensors, {format_size(sum(row.size for row in rows))} in {store.folder}")


@app.command()
def verify(cache_dir: Folder = None) -> None:
    """Read everything that is kept, and remove what is damaged; a client will send it again."""
    from drover.worker.store import Store

    logs.configure("console", verbose=False)
    store = Store(_existing(cache_dir))
    rows = store.rows()
    found = Counter(store.check(row.key) for row in rows)
    sound = found["sound"] + found["new"]
    new = f", {found['new']} of them without a SHA-256 until now" if found["new"] else ""
    if found["busy"]:
        print(f"not checked, for somebody is writing them or we may not read them: {found['busy']}")
    print(f"{sound} of {len(rows)} tensors are sound{new}; {found['damaged']} were damaged and are removed")
    if shared := store.shared_keys():
        print(f"hashes that two tensors have, which are therefore not kept: {len(shared)}")


@app.command()
def seed(
    model: Annotated[Path, typer.Argument(help="A GGUF file, or the first of its parts.")],
    cache_dir: Folder = None,
    cache_size: Annotated[
        str | None, typer.Option("--cache-size", help="As for the worker; by default 80 % of the free room.")
    ] = None,
) -> None:
    """Store every tensor of a model, so that clients that load it from there on need send none."""
    from drover.coordinator.model_file import ModelFile
    from drover.worker.store import Store

    logs.configure("console", verbose=False)
    with ModelFile(model) as file:
        store = Store(weights_folder(cache_dir), None if cache_size is None else parse_size(cache_size))
        total = sum(info.nbytes for info in file.tensors.values())
        if total > store.limit:
            raise DroverError(
                f"{model} has {format_size(total)} of weights, and {store.folder} may hold {format_size(store.limit)}: "
                "give more with --cache-size, or free the disk"
            )
        before, use = store.used, store.use()
        try:
            left = [name for name in file.tensors if not use.put(file.data(name))]
        finally:
            use.close()
        file.check_unchanged()
    if left:
        raise DroverError(
            f"{len(left)} of {len(file.tensors)} tensors of {model} are not in {store.folder}, {left[0]} first: "
            "others are in use there, the disk is full, or see above"
        )
    print(
        f"{len(file.tensors)} tensors, {format_size(total)} in {store.folder}; it grew by {store.used - before} bytes"
    )


@app.command()
def prune(
    to: Annotated[str, typer.Option("--to", help="Bytes of weights that may stay, e.g. 20GiB.")],
    cache_dir: Folder = None,
) -> None:
    """Remove what was not used for longest, but nothing that a connected client uses."""
    from drover.worker.store import Store

    store, limit = Store(_existing(cache_dir)), parse_size(to)
    gone = store.trim(limit)
    print(f"removed {format_size(gone)}; {format_size(store.used)} in {store.folder}")
    if store.used > limit:
        raise DroverError(
            f"more than {format_size(limit)} are in use by clients that are connected; nothing else is left"
        )


def _existing(cache_dir: Path | None) -> Path:
    folder = weights_folder(cache_dir)
    if not folder.is_dir():
        raise DroverError(f"there is no weight cache {folder}; --cache-dir names the worker's folder")
    return folder
