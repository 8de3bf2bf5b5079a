"""States of pieces: what ranks have of larger tensors, saved by offsets and loaded with others."""

import torch
from daemon import run_ranks

COMMON = """
from storaged.torch._pieces import PiecesCheckpointer, place_of

WHOLE = torch.arange(96, dtype=torch.float32).reshape(8, 12)
checkpointer = PiecesCheckpointer()

def own(step, parts):
    # Rows of a matrix, a bias that all have, and an object of each rank.
    rows = 8 // parts
    pieces = {"a.b": {place_of((n * rows, 0), (8, 12)): WHOLE[n * rows:(n + 1) * rows] * step for n in range(parts) if n % world == rank}}
    pieces["bias"] = {place_of((), ()): torch.tensor(float(step))}
    return {"pieces": pieces, "objects": {f"of {rank}": [rank, step], "of all": step}}

def columns():
    state = {"pieces": {"a.b": {place_of((0, 6 * rank), (8, 12)): torch.zeros(8, 6)}, "bias": {place_of((), ()): torch.zeros(())}}}
    return {**state, "objects": {"of 0": None, "of 1": None, "of all": None}}
"""


def test_pieces_are_saved_by_offsets_and_loaded_with_others(shared_daemon, tmp_path):
    body = COMMON + """
for step in (1, 2, 3):
    said.append(checkpointer.save(step, own(step, 4)) is not None)
said.append(checkpointer.wait())
said.append(checkpointer._memory.again)
got = columns()
checkpointer.load(got)
(tensor,) = got["pieces"]["a.b"].values()
(bias,) = got["pieces"]["bias"].values()
said.append(torch.equal(tensor, WHOLE[:, 6 * rank:6 * rank + 6] * 3) and bias.item() == 3.0)
said.append(got["objects"])
whole = checkpointer.load_all()
said.append(torch.equal(whole["a.b"], WHOLE * 3) and sorted(whole) == ["a.b", "bias", "of 0", "of 1", "of all"])
"""
    said, errors = run_ranks(tmp_path, [shared_daemon.socket] * 2, body)
    expected = [True, True, True, True, 2, True, {"of 0": [0, 3], "of 1": [1, 3], "of all": 3}, True]
    assert said == [expected, expected], errors


def test_parts_that_lie_elsewhere_are_planned_anew(shared_daemon, tmp_path):
    body = COMMON.replace("PiecesCheckpointer()", "PiecesCheckpointer(\"elsewhere\")") + """
swapped = lambda step: {"pieces": {"w": {place_of((4 * ((rank + step) % 2),), (8,)): torch.full((4,), float(10 * step + rank))}}}
for step in (1, 2):
    checkpointer.save(step, swapped(step))
said.append(checkpointer.wait())
said.append(checkpointer._memory.again)
said.append(checkpointer.load_all()["w"].tolist())
"""
    said, errors = run_ranks(tmp_path, [shared_daemon.socket] * 2, body)
    assert said == [[True, 0, [20.0] * 4 + [21.0] * 4]] * 2, errors


def test_what_is_not_there_or_has_another_shape_is_said_on_all_ranks(shared_daemon, tmp_path):
    body = COMMON.replace("PiecesCheckpointer()", "PiecesCheckpointer(\"missing\")") + """
checkpointer.save(1, own(1, 4))
checkpointer.wait()
attempt(checkpointer.load, {"pieces": {"c": {place_of((0,), (4,)): torch.zeros(4)}}})
attempt(checkpointer.load, {"pieces": {"a.b": {place_of((0, 0), (8, 13)): torch.zeros(8, 13)}}})
attempt(checkpointer.load, {"objects": {"bias": None}})
"""
    said, errors = run_ranks(tmp_path, [shared_daemon.socket] * 2, body)
    for rank in said:
        assert [one[0] for one in rank] == ["CheckpointLoadError"] * 3, errors
        assert "no values for c" in rank[0][1] and "(8, 12), expected (8, 13)" in rank[1][1] and "expected a value" in rank[2][1]


def test_a_state_that_is_none_of_pieces_is_refused(shared_daemon, tmp_path):
    body = COMMON.replace("PiecesCheckpointer()", "PiecesCheckpointer(\"strange\", on_error=\"warn\")") + """
attempt(lambda: checkpointer.save(1, {"weights": torch.zeros(4)}).saved.result())
attempt(lambda: checkpointer.save(2, {"objects": {"deep": {"w": torch.zeros(4)}}}).saved.result())
"""
    said, errors = run_ranks(tmp_path, [shared_daemon.socket] * 2, body)
    for rank in said:
        assert [one[0] for one in rank] == ["CheckpointSaveError"] * 2, errors
        assert "got 'weights'" in rank[0][1] and "got 'objects.deep.w'" in rank[1][1]
