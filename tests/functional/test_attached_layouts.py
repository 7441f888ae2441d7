"""attach.py in layouts of two processes: one step of Megatron's schedule, DDP and optimizer (attached_worker.py).

Two microbatches, or four with a drafter, each of three rows or of a packed row of four documents.
"""

import json
from itertools import combinations, product
from pathlib import Path

import launch
import pytest
from drafter_settings import SETTINGS
from tiers import tiered

WORKER = Path(__file__).parents[1] / "support" / "attached_worker.py"
LAYOUTS = ("tp2", "tp2-sp", "pp2", "cp2", "dp2")
KINDS = ("dense", "moe", "latent", "hybrid")
CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS if (layout, kind) != ("tp2", "moe")]
CASES += [("ep2", "moe"), ("pp2-vpp2", "dense"), ("pp2-vpp2", "moe"), *(("dp2-sharded", kind) for kind in KINDS)]
"""With tensor parallelism, Megatron trains experts only under sequence parallelism."""

HEADS, DEPTHS, FORMS = ("untied", "tied"), ("new", "adopted"), ("rows", "packed")
"""What is compared per layout and kind: heads, new MTP layers or those of Megatron's block, and batch formats."""


def compared(layout: str, kind: str) -> list[tuple[str, str, str]]:
    """Return heads, origins of MTP layers and batch formats to compare.

    Formats alternate between neighboring layouts and kinds, so that each head meets both. Layouts of one kind, and
    hybrids, which Megatron's block does not support, get both formats.
    """
    if kind == "hybrid":
        return list(product(HEADS, DEPTHS[:1], FORMS))
    if layout == "ep2":
        return list(product(HEADS, DEPTHS, FORMS))
    turn = (*LAYOUTS, "pp2-vpp2", "dp2-sharded").index(layout) + (kind == "dense")
    forms = {
        (head, depths): FORMS[(turn + i + j) % 2] for i, head in enumerate(HEADS) for j, depths in enumerate(DEPTHS)
    }
    return [(*case, form) for case, form in forms.items()]


def test_the_cases_cover_every_combination_of_four_factors() -> None:
    met = {(layout, kind, *case) for layout, kind in CASES for case in compared(layout, kind)}
    whole = {
        (layout, kind, *case)
        for layout, kind in CASES
        for case in product(HEADS, DEPTHS[:1] if kind == "hybrid" else DEPTHS, FORMS)
    }
    for four in combinations(range(5), 4):
        of_met, of_whole = ({tuple(case[place] for place in four) for case in cases} for cases in (met, whole))
        assert of_whole - of_met == set()


@pytest.mark.parametrize(
    ("layout", "kind"),
    tiered(CASES, [("cp2", "dense")]),
)
def test_attached_layers_keep_the_trunk_and_train_as_in_our_model(layout: str, kind: str, tmp_path: Path) -> None:
    """With new MTP layers and those of Megatron's block, head tied and untied (`compared`):

    - trunk: logits, gradients and weights after a step are bit-identical to the model without MTP layers;
    - ours: gradients of a loss that trains everything match this package's own model and `mtp_loss`;
    - weight: `attach` with a loss weight matches an explicit loss;
    - mask: in a policy's forward pass, without labels, gradients match Megatron's training of its own block (cp2);
    - copies: a last stage without an embedding gets the first stage's, and one with a tied head gets no second copy.
    """
    cases = [" ".join(case) for case in compared(layout, kind)]
    launch.run(launch.torchrun(2, WORKER, str(tmp_path / "found.json"), layout, kind, *cases), tmp_path / "log")
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == cases
    wrong = {(case, what): names for case, each in found.items() for what, names in each.items() if names}
    if layout.startswith("pp2") and kind != "hybrid":  # Megatron 0.19.2 cannot save its own block's head in this case
        for case in cases:
            if case.startswith("tied adopted"):
                assert wrong.pop((case, "saved"))[0].startswith("AssertionError")
    assert wrong == {}


OF_DRAFTERS = [(layout, "dense") for layout in ("tp2", "tp2-sp", "cp2", "dp2", "dp2-sharded")]
OF_DRAFTERS += [("ep2", "moe"), ("cp2", "latent"), ("tp2-sp", "hybrid")]
OF_DRAFTERS += [("pp2", "dense"), ("pp2", "hybrid"), ("pp2-vpp2", "dense")]


@pytest.mark.parametrize(("layout", "trunk"), tiered(OF_DRAFTERS, [("pp2-vpp2", "dense")]))
def test_attached_heads_keep_the_policy_and_train_as_in_train(
    layout: str, trunk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """With several heads (MTP layers, DSpark, and EAGLE-3 with a draft vocabulary), and with --all each drafter alone:

    - policy: logits, gradients and weights after a step are bit-identical to the model without heads;
    - ours: a drafter's gradients match `train --drafter` on a frozen trunk in this layout;
    - one process, exported: gradients and weights of the heads after a step, and the drafters' folders, which all ranks
      receive, match those of one process (pipeline stages).
    """
    forms = ("packed",) if layout == "cp2" else FORMS
    alone = SETTINGS if pytestconfig.getoption("--all") else ()
    cases = [f"{kind} {form}" for kind in (*alone, "several") for form in forms]
    worker, file = WORKER.with_name("attached_drafter_worker.py"), tmp_path / "found.json"
    monkeypatch.setenv("OF_ONE_PROCESS", str(tmp_path))
    if layout.startswith("pp2"):
        launch.run(launch.torchrun(1, worker, str(file), "one", trunk, *cases), tmp_path / "log")
    launch.run(launch.torchrun(2, worker, str(file), layout, trunk, *cases), tmp_path / "log")
    found = json.loads(file.read_text())
    assert list(found) == cases
    assert {(case, what): names for case, each in found.items() for what, names in each.items() if names} == {}
