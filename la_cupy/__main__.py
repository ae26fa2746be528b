"""The command line: `python -m la_cupy`, `... compile` and `... selftest`."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, NoReturn

from . import compile, info, selftest, warm
from .kernels import Spec
from .problem import GPU_WIDTH_LIMIT

DESCRIPTION = (
    "Exact linear attention for NumPy and CuPy arrays: what is installed, and does it work?"
)


class _Parser(argparse.ArgumentParser):
    """Errors are one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _widths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= GPU_WIDTH_LIMIT for part in parts):
        raise argparse.ArgumentTypeError(
            f"it takes numbers from 1 to {GPU_WIDTH_LIMIT} separated by commas, as 64,128, "
            f"but got {text!r}"
        )
    return tuple(int(part) for part in parts)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m la_cupy", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="")
    commands.add_parser("info", help="versions, devices and compiled kernels (the default)")

    make = commands.add_parser("compile", help="compile kernels ahead, into CuPy's cache")
    make.add_argument(
        "--dtype",
        nargs="+",
        choices=warm.KINDS,
        default=warm.STANDARD_KINDS,
        help='arithmetic to compile for; tf32 is float32 with precision="tf32" '
        f"(default: {' '.join(warm.STANDARD_KINDS)})",
    )
    make.add_argument(
        "--widths",
        type=_widths,
        default=warm.STANDARD_WIDTHS,
        metavar="64,128",
        help="D = E, separated by commas; a kernel serves all widths up to the next power of two",
    )
    make.add_argument(
        "--feature-map",
        nargs="+",
        choices=warm.ALL_FEATURES,
        default=warm.STANDARD_FEATURES,
        help="feature maps (default: identity)",
    )
    make.add_argument("--all", action="store_true", help="every type, width and feature map")

    test = commands.add_parser("selftest", help="compare this machine with the definition")
    test.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="what to check (default: the GPU if CuPy finds one, else the CPU)",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = _parser().parse_args(arguments)
    if given.command == "compile":
        return _compile(given)
    if given.command == "selftest":
        return _selftest(given.device)
    print("\n".join(info.report()))
    return 0


def _compile(given: Any) -> int:
    devices, why_none = info.devices()
    if not devices:
        print(f"nothing to compile for: {why_none}", file=sys.stderr)
        return 1
    kinds, widths, features = given.dtype, given.widths, given.feature_map
    if given.all:
        kinds, widths, features = warm.KINDS, warm.ALL_WIDTHS, warm.ALL_FEATURES
    for device in dict.fromkeys(devices):  # GPUs of one kind share what is compiled
        started = time.perf_counter()
        chosen = warm.choices(device, kinds, widths, features).values()
        specs = list(dict.fromkeys(spec for choice in chosen for spec in choice))
        _compile_with_progress(specs, devices.index(device), f"sm_{device.arch}")
        seconds = time.perf_counter() - started
        print(f"{len(specs)} kernels ready for {device.name} (sm_{device.arch}) in {seconds:.1f} s")
    print(f"they are in {info.cache_folder()}")
    return 0


def _compile_with_progress(specs: list[Spec], device: int, title: str) -> None:
    for _ in _progress(compile.load_each(specs, device), len(specs), title):
        pass


def _progress(items: Iterable[Spec], total: int, title: str) -> Iterable[Spec]:
    """`items`, with a bar if tqdm is installed, or a line for every tenth of them."""
    if find_spec("tqdm") is not None:
        from tqdm import tqdm

        bar: Iterable[Spec] = tqdm(items, total=total, desc=f"kernels for {title}", unit="kernel")
        return bar
    return _lines(items, total, title)


def _lines(items: Iterable[Spec], total: int, title: str) -> Iterator[Spec]:
    step = max(1, -(-total // 10))
    for count, item in enumerate(items, 1):
        if count % step == 0 or count == total:
            print(f"kernels for {title}: {count} of {total}", file=sys.stderr)
        yield item


def _selftest(device: str | None) -> int:
    devices, why_none = info.devices()
    if device == "gpu" and not devices:
        print(f"NOT fine: there is no GPU to check: {why_none}", file=sys.stderr)
        return 1
    started = time.perf_counter()
    outcomes = []
    if device == "cpu" or not devices:
        if why_none and device is None:
            print(f"{why_none}; so the CPU is checked")
        place, results = "the CPU", selftest.on_cpu()
    else:
        place = f"the GPU {devices[0].name} (sm_{devices[0].arch})"
        results = selftest.on_gpu()
        _compile_with_progress(selftest.specs(devices[0]), 0, f"sm_{devices[0].arch}")
    for outcome in results:
        print(outcome, flush=True)
        outcomes.append(outcome)
    fine, sentence = selftest.verdict(place, outcomes, started)
    print(sentence)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
