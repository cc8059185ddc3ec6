"""This benchmark on the package of another checkout: figures that are new here have a counterpart there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_OWN = "bench"


@contextmanager
def overlaid(checkout: Path) -> Iterator[Path]:
    """A folder for PYTHONPATH that holds the package of `checkout` with this benchmark in place of its own."""
    package = checkout.resolve() / "src" / "flowfabric"
    if not (package / "__init__.py").is_file():
        raise ValueError(f"no checkout of this project at {checkout}: {package / '__init__.py'} does not exist")
    with TemporaryDirectory(prefix="flowfabric-beside-") as folder:
        overlay = Path(folder) / "flowfabric"
        overlay.mkdir()
        for each in package.iterdir():
            if each.name not in (_OWN, "__pycache__"):
                (overlay / each.name).symlink_to(each)
        (overlay / _OWN).symlink_to(Path(__file__).resolve().parent)
        yield overlay.parent
