"""Makes the files of a release twice, compares them byte for byte, keeps one set in `dist/`; SHA256SUMS lists them."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from release.build import ReleaseError, build_release, digest, find_differences, read_revision, write_checksums
from release.images import build_images

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Make a release of the last commit; return the exit code."""
    options = _parser().parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="release-") as name:
            _make(options, Path(name))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--uv", type=Path, required=True, help="the package installer")
    parser.add_argument("--pip", type=Path, required=True, help="pip, which downloads the plugin's compiled modules")
    parser.add_argument("--base-url", help="address under which the files will be published, for the manifest of krew")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files")
    parser.add_argument("--commit", default="HEAD", help="what to release; default: the last commit")
    images = parser.add_mutually_exclusive_group()
    images.add_argument("--no-images", action="store_true", help="leave the images out")
    images.add_argument("--complete", action="store_true", help="fail if anything has to be left out")
    return parser


def _make(options: argparse.Namespace, folder: Path) -> None:
    plugin = ["--pip", str(options.pip), *(["--base-url", options.base_url] if options.base_url else [])]
    revision = read_revision(ROOT, options.commit)  # once: a branch may move meanwhile
    sources = folder / "source-1", folder / "source-2"
    made = []
    for source in sources:
        target = folder / f"files-of-{source.name}"
        source.mkdir()
        target.mkdir()
        made.append(build_release(ROOT, source, target, uv=options.uv, plugin=plugin, commit=revision))
    if differing := find_differences(*made):
        raise ReleaseError(f"expected the same bytes twice, found differences in {', '.join(differing)}")
    kept = made[0][0].parent
    left_out = []
    if not options.no_images:
        left_out = build_images(sources, kept, uv=options.uv, revision=revision)
        write_checksums(kept)
    for item in left_out:
        print(f"release: left out: {item.what}: {item.reason}", file=sys.stderr)
    if options.complete and left_out:
        raise ReleaseError("expected everything (--complete), found parts that this machine cannot build")
    options.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(kept.iterdir()):
        shutil.copy(path, options.out / path.name)
        print(f"{digest(path)}  {path.name}")


if __name__ == "__main__":
    sys.exit(main())
