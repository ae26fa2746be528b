"""The kernels compiled for real GPUs, without one: registers, spills, tensor cores.

A pairwise cover of the specialisations that plans choose runs by default; every one of them with
``pytest tests/test_compile_nvrtc.py -m slow``, which takes hours.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from specialisations import (
    A100,
    ARITHMETICS,
    H200,
    KERNELS,
    L40,
    OTHERS,
    RTX50,
    choices,
    cover,
    matrix_spec,
    pairwise,
    register_limit,
    specialisations,
)

from la_cupy import compile as la_compile
from la_cupy.device import DeviceInfo
from la_cupy.kernels import (
    FEATURES,
    KEYS,
    QUERIES,
    STREAM,
    WGMMA,
    KernelSpec,
    KeyValueSpec,
    ScanSpec,
    Spec,
    StreamedSpec,
    StreamSpec,
)

nvrtc = pytest.importorskip("nvrtc", exc_type=ImportError)  # needs cuda-bindings

ARCHS = {"sm_80": A100, "sm_89": L40, "sm_90a": H200, "sm_120": RTX50}
INSTRUCTIONS = {"F64": ("DMMA",), WGMMA: ("HGMMA",), STREAM: ("HGMMA", "UTMALDG")}
"""Products on the tensor cores; and what brings rows where the tensor memory accelerator does."""
MOST = 60  # specialisations an arch, for the time of CI


def examine(spec: Spec, arch: str) -> list[str]:
    """What is wrong with the machine code of `spec`."""
    kernel = nvrtc.compile_kernel(spec, arch)
    faults = []
    if max(kernel.spilled, kernel.stack) > 0:
        faults.append(
            f"{kernel.spilled} bytes of spills and {kernel.stack} of stack "
            f"at {kernel.registers} registers"
        )
    most = register_limit(spec)
    if kernel.registers > most:
        faults.append(f"{kernel.registers} registers, of which {spec.threads} threads have {most}")
    if isinstance(spec, KernelSpec):
        found = kernel.instructions()
        sums = isinstance(spec, StreamedSpec) and spec.role in (KEYS, QUERIES)
        stores = ("UTMASTG",) if isinstance(spec, StreamedSpec) and not sums else ()
        for wanted in (*INSTRUCTIONS.get(spec.arith, ("HMMA",)), *stores):
            if not found[wanted]:
                faults.append(f"no {wanted} among its {found.total()} instructions")
    return [f"{spec.name} for {arch}: {fault}" for fault in (*faults, *kernel.notes)]


@pytest.mark.parametrize(
    ("arch", "spec"),
    [(arch, spec) for arch, device in ARCHS.items() for spec in cover(device)],
    ids=lambda x: x if isinstance(x, str) else x.name.replace("la::", ""),
)
def test_cover(arch: str, spec: Spec) -> None:
    faults = examine(spec, arch)
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda x: f"{x[0]}-causal" if x[1] else x[0])
@pytest.mark.parametrize("arith", ARITHMETICS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_specialisation(
    arch: str, arith: str, kernel: tuple[str, bool], request: pytest.FixtureRequest
) -> None:
    if request.config.option.markexpr != "slow":
        pytest.skip("takes hours: ask for it with -m slow")
    faults = []
    for spec in specialisations(ARCHS[arch], (arith,), (kernel,)):
        faults += examine(spec, arch)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("arch", ARCHS)
def test_cover_is_small_and_has_all_pairs(arch: str) -> None:
    def pairs(specs: tuple[Spec, ...]) -> set[frozenset]:
        matrix = (choices(spec) for spec in specs if isinstance(spec, KernelSpec))
        return {frozenset((x, y)) for chosen in matrix for x in chosen for y in chosen if x != y}

    device = ARCHS[arch]
    assert pairs(cover(device)) == pairs(specialisations(device))
    assert len(cover(device)) <= MOST
    assert tuple(pairwise(specialisations(device))) == cover(device)[: -len(OTHERS)], (
        "not the same each time"
    )


@pytest.mark.parametrize("choice", ["arithmetic", "kernel", "feature"])
@pytest.mark.parametrize("arch", ARCHS)
def test_cover_has_every_choice(arch: str, choice: str) -> None:
    hopper = arch == "sm_90a"
    every = {
        "arithmetic": {*ARITHMETICS, *([WGMMA, STREAM] if hopper else [])},
        "kernel": {role for role, _ in KERNELS} | ({"GradKV"} if hopper else set()),
        "feature": set(FEATURES),
    }
    matrix = [spec for spec in cover(ARCHS[arch]) if isinstance(spec, KernelSpec)]
    assert {dict(choices(spec))[choice] for spec in matrix} == every[choice]


def test_cover_has_stream_with_every_choice() -> None:
    def chosen(specs: tuple[Spec, ...]) -> set[tuple[str, object]]:
        return {x for spec in specs if isinstance(spec, StreamSpec) for x in choices(spec)}

    every = chosen(cover(H200))
    assert every == chosen(specialisations(H200))
    assert {x for name, x in every if name == "feature"} == {"identity", "relu"}
    assert {x for name, x in every if name in ("inner", "columns")} == {64, 128}
    assert {x for name, x in every if name == "causal"} == {False, True, None}
    walks = {(role, causal) for role in ("Forward", "GradQ") for causal in (False, True)}
    assert {x for name, x in every if name == "stream"} == walks | {("keys", None)}


def test_cover_has_every_walk_backwards() -> None:
    found = [spec for spec in specialisations(H200) if isinstance(spec, KeyValueSpec)]
    walks = (("GradKV", False), ("GradKV", True), (QUERIES, True))
    expected = {(*walk, width) for walk in walks for width in (64, 128)}
    assert {(x.role, x.causal, x.inner) for x in found} == expected and len(found) == 6
    assert set(found) <= set(cover(H200))


def test_a_spill_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the blocks on a multiprocessor leave a thread half of its registers."""
    spec = matrix_spec(("Forward", True), "Bf16", "identity", 128, 128, A100)
    crowded = (
        '#include "ptx/types.cuh"\n#undef LA_KERNEL\n'
        "#define LA_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, 2 * blocks)\n"
    )
    plain = la_compile.source_text
    monkeypatch.setattr(la_compile, "source_text", lambda spec: crowded + plain(spec))
    assert any("bytes of spills" in fault for fault in examine(spec, "sm_80"))


def test_unknown_arch_is_a_one_line_error() -> None:
    with pytest.raises(nvrtc.CompileError) as caught:
        nvrtc.compile_kernel(ScanSpec(False), "sm_75x")
    message = str(caught.value)
    assert "arch" in message and "sm_75x" in message and "\n" not in message


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of kernels_cu that la_cupy.compile takes for the real one."""
    copy = tmp_path / "kernels_cu"
    shutil.copytree(la_compile.source_folder(), copy)
    monkeypatch.setattr(la_compile, "source_folder", lambda: copy)
    la_compile.tree_hash.cache_clear()
    yield copy
    la_compile.tree_hash.cache_clear()


def text_now(spec: Spec) -> str:
    la_compile.tree_hash.cache_clear()
    return la_compile.source_text(spec)


def test_source_text_changes_with_every_file(tree: Path) -> None:
    spec = ScanSpec(False)
    before = text_now(spec)
    assert text_now(spec) == before
    names = sorted(path.relative_to(tree) for path in tree.rglob("*.cu*"))
    assert len(names) > 10
    for name in names:
        path = tree / name
        original = path.read_bytes()
        path.write_bytes(original + b"\n")
        assert text_now(spec) != before, f"an edit of {name} would run stale code"
        path.write_bytes(original)
    assert text_now(spec) == before
    renamed = tree / names[0].with_suffix(".other.cuh")
    (tree / names[0]).rename(renamed)
    assert text_now(spec) != before
    renamed.rename(tree / names[0])
    (tree / "chunk" / "new.cuh").write_text("")
    assert text_now(spec) != before


def test_every_include_lies_in_the_tree() -> None:
    """What is hashed is all that is compiled: no file from elsewhere."""
    folder = la_compile.source_folder()
    for path in folder.rglob("*.cu*"):
        for line in path.read_text().splitlines():
            if line.startswith("#include"):
                name = line.split('"')[1]
                assert (folder / name).is_file(), f"{path.name} includes {name}"


def test_a_device_is_named_for_each_arch() -> None:
    for arch, device in ARCHS.items():
        assert isinstance(device, DeviceInfo)
        assert arch.rstrip("a") == f"sm_{device.arch}"
