"""API reference pages from the docstrings of the package, by pdoc.

python tools/docs/api_pages.py [folder]     default: runs/api, whose index.html leads to every module
"""

import pkgutil
import sys
import warnings
from pathlib import Path

import pdoc

import megatron_mtp
from megatron_mtp import decoding
from megatron_mtp.megatron.runtime import prepare

prepare()

DEFAULT = Path("runs/api")


def main(folder: Path) -> None:
    """Write the pages of all modules; what is private has none."""
    for name in decoding.__all__:
        setattr(decoding, name, getattr(decoding, name))  # they are imported when asked for, which pdoc does not do
    modules = [module.name for module in pkgutil.walk_packages(megatron_mtp.__path__, "megatron_mtp.")]
    pdoc.render.configure(docformat="google", footer_text="megatron-mtp", show_source=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error parsing type annotation")  # of Megatron's classes
        pdoc.pdoc("megatron_mtp", *(name for name in modules if "._" not in name), output_directory=folder)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    main(target)
    print(target / "index.html")
