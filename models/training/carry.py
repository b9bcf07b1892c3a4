"""`carry`: a run's newest weights in bf16 with its log, in pieces under 15 MiB, and back: for machines from which only a few
small files return.

The optimiser's state stays behind: a stage that begins from carried weights warms up again. Within one machine nothing of this
is needed, states lie in the run's folder.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

import torch

from .runs import Run

PIECE = 15 << 20
NAME = "carry-{:02}-of-{:02}.part"


def split(run: Run, out: Path) -> list[Path]:
    """Write the pieces: the newest stage's weights, and every small file of the run."""
    newest = run.newest()
    if newest is None:
        raise ValueError(f"{run.folder} has no weights yet")
    stage, state = newest
    weights = {n: v.bfloat16() if v.dim() > 1 and ".hc_" not in n else v for n, v in state["model"].items()}
    saved, archive = io.BytesIO(), io.BytesIO()
    torch.save({"stage": stage, "model": weights}, saved)
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for file in sorted(run.folder.glob("*.json*")):
            tar.add(file, file.name)
        entry = tarfile.TarInfo("weights.pt")
        entry.size = saved.tell()
        saved.seek(0)
        tar.addfile(entry, saved)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("carry-*.part"):
        old.unlink()
    data, paths = archive.getvalue(), []
    count = -(-len(data) // PIECE)
    for number in range(count):
        paths.append(out / NAME.format(number + 1, count))
        paths[-1].write_bytes(data[number * PIECE : (number + 1) * PIECE])
    return paths


def join(source: Path, folder: Path) -> str:
    """A run's folder from pieces; returns the stage that they are of. The next stage begins from it."""
    found = sorted(source.glob("carry-*.part"))
    count = int(found[0].stem.rpartition("-")[2]) if found else 0
    wanted = [NAME.format(number + 1, count) for number in range(count)]
    if not found or [p.name for p in found] != wanted:
        raise ValueError(f"{source} has {[p.name for p in found]}; all of {wanted or 'carry-*.part'} are needed")
    try:
        with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in found))) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
        saved = torch.load(io.BytesIO(files.pop("weights.pt")), weights_only=True)
    except (tarfile.TarError, KeyError, RuntimeError, EOFError) as error:
        raise ValueError(f"the pieces in {source} do not fit together ({error}); was one cut off?") from None
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / Path(name).name).write_bytes(data)
    saved["model"] = {name: value.float() if value.is_floating_point() else value for name, value in saved["model"].items()}
    Run(folder).save(saved["stage"], {"model": saved["model"], "carried": True})
    return saved["stage"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("pieces", type=Path, help="folder of the pieces")
    parser.add_argument("--back", action="store_true", help="make the run's folder from the pieces")


def main(args: argparse.Namespace) -> None:
    """Cut a run's newest weights into small bf16 pieces, or (--back) make a run from them; later stages go on from there."""
    if args.back:
        print(f"{args.run}: weights of stage {join(args.pieces, args.run)}; the next stage goes on from them")
        return
    for path in split(Run(args.run), args.pieces):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")
