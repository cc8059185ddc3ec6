"""Run this version of the benchmark on the package of another checkout, so that both have the same figures."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_OWN = "bench"


@contextmanager
def overlaid(checkout: Path) -> Iterator[Path]:
    """A folder for PYTHONPATH with the package of `checkout`, in which this benchmark replaces its own."""
    package = checkout.resolve() / "src" / "flowfabric"
    if not (package / "__init__.py").is_file():
        raise ValueError(
            f"{checkout} is not a checkout of this project: {package / '__init__.py'} does not exist; "
            "give the root folder of a checkout"
        )
    with TemporaryDirectory(prefix="flowfabric-beside-") as folder:
        overlay = Path(folder) / "flowfabric"
        overlay.mkdir()
        for each in package.iterdir():
            if each.name not in (_OWN, "__pycache__"):
                (overlay / each.name).symlink_to(each)
        (overlay / _OWN).symlink_to(Path(__file__).resolve().parent)
        yield overlay.parent
