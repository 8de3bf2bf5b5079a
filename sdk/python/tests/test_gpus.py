"""Saves and loads of tensors on GPUs: PyTorch's own CUDA code and a real daemon, but a CUDA runtime that has no GPU (cudart.py).

Its streams do nothing until they are waited for, so that a copy that waits for too little, or is looked at too early, has other bytes.
"""

import _thread
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import cudart as runtime
import pytest
import torch
from storaged import errors
from storaged.torch import Checkpointer
from test_background import Held

ON_GPUS = runtime.is_preloaded()
with_gpus = pytest.mark.skipif(not ON_GPUS, reason="run by test_on_a_runtime_without_a_gpu")


@pytest.mark.skipif(ON_GPUS, reason="runs the others")
def test_on_a_runtime_without_a_gpu(tmp_path):
    if (why := runtime.why_not()) is not None:
        pytest.skip(why)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", __file__]
    done = subprocess.run(command, env=runtime.environment(tmp_path), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    assert "1 skipped" in done.stdout, done.stdout


@pytest.fixture
def cuda():
    from storaged.torch import _pinned

    # What is left of other tests is given back first.
    gc.collect()
    _pinned._clerk_of_process().finish(20)
    one = runtime.Cuda()
    yield one
    wrong = [call.text for call in one.calls() if call.text.startswith("WRONG")]
    one.refuse()
    assert not wrong


def there(device, tensor):
    """On that GPU, and what its stream was given so far done."""
    return tensor.to(f"cuda:{device}")


def trained(weights, tensor):
    """What the trainer gives its stream, which comes to it later: the weights become that tensor."""
    weights.copy_(there(weights.device.index, tensor))


def numbers(step, count=30_000):
    return torch.arange(float(count)) + step


def same(tensor, expected):
    return torch.equal(tensor.cpu(), expected)


@with_gpus
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("structure", ["unknown", "known"])
def test_a_save_is_of_what_the_devices_stream_was_given_before_it(session, cuda, background, structure):
    state = {"w": there(1, numbers(0)), "deep": [there(1, torch.zeros(7)), "text"], "cpu": numbers(9), "scalar": there(1, torch.tensor(5.0))}
    with Checkpointer(session=session, background=background) as checkpointer:
        if structure == "known":
            checkpointer.save(1, state)
            assert checkpointer.wait()
        cuda.forget()
        trained(state["w"], numbers(2))
        handle = checkpointer.save(2, state)
        handle.staged.result(20)
        copies, calls = cuda.copies("to-host"), cuda.calls()
        assert len(copies) == 3 and all("locked" in call.text and call.device == 1 for call in copies)
        (stream,) = {call.stream for call in copies}
        assert stream != 0, "the trainer's own stream waits for no copy"
        # Behind what its stream was given, and waited for once, behind all of them.
        waits = [call for call in calls if call.name == "wait" and call.stream == stream]
        marks = [call for call in calls if call.name == "record" and call.event == waits[0].event]
        assert marks[0].stream == 0 and calls.index(marks[0]) < calls.index(waits[0]) < calls.index(copies[0])
        last = [call for call in calls if call.name == "record" and call.stream == stream][-1]
        synced = [call for call in calls if call.name == "event-synchronize"]
        assert [call.event for call in synced] == [last.event] and calls.index(copies[-1]) < calls.index(last) < calls.index(synced[0])
        assert not [call for call in calls if call.name == "malloc" and call.device == 0], "no context where no tensor is"
        assert checkpointer.wait()
        loaded = checkpointer.load_all()
    assert same(loaded["w"], numbers(2)) and same(loaded["cpu"], numbers(9)) and loaded["scalar"] == 5 and loaded["deep"][1] == "text"


@with_gpus
def test_cuda_is_asked_for_nothing_where_no_tensor_is_on_a_gpu(session, cuda):
    turned = torch.ones(40, 3).t()
    with Checkpointer(session=session, background=True) as checkpointer:
        checkpointer.prepare({"w": numbers(1), "turned": turned}).result(20)
        for step in (1, 2):
            checkpointer.save(step, {"w": numbers(step), "turned": turned})
            assert checkpointer.wait()
        into = {"w": numbers(0), "turned": torch.zeros(40, 3).t()}
        checkpointer.load(into)
    assert same(into["w"], numbers(2)) and same(into["turned"], turned) and cuda.calls() == []


@with_gpus
def test_a_slot_is_page_locked_once_and_by_the_thread_that_does_nothing_else(session, cuda):
    with Checkpointer(session=session) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, {"w": there(1, numbers(step))})
            assert checkpointer.wait()
        locked = cuda.calls("register")
        assert 0 < len(locked) <= 3 and len({call.at for call in locked}) == len(locked)
        assert all(call.flags == 1 and call.device == 1 and call.error == 0 for call in locked)
        assert cuda.calls("unregister") == []
        assert all(is_mapped(call) for call in locked)
        # An error of CUDA's stays with the thread that met it: not with one of the trainer's.
        ids = {thread.native_id for thread in threading.enumerate() if thread.name == "storaged-pin"}
        assert {call.thread for call in locked} == ids and len(ids) == 1


def is_mapped(call):
    with open("/proc/self/maps") as maps:
        return any(line.startswith(f"{call.at:x}-") for line in maps)


def soon(check):
    limit = time.monotonic() + 20
    while not check():
        assert time.monotonic() < limit
        time.sleep(0.02)


@with_gpus
def test_prepare_page_locks_the_slots_ahead(session, cuda):
    state = {"w": there(0, numbers(1)), "step": 1}
    with Checkpointer(session=session) as checkpointer:
        checkpointer.prepare(state).result(20)
        assert len(cuda.calls("register")) == 2 and cuda.copies("to-host") == []
        for step in (1, 2):
            checkpointer.save(step, state)
            assert checkpointer.wait()
        checkpointer.prepare(state).result(20)
        assert len({call.at for call in cuda.calls("register")}) == len(cuda.calls("register"))
        checkpointer.prepare({"w": numbers(1)}).result(20)


@with_gpus
def test_it_is_given_back_before_it_is_unmapped(daemons, cuda):
    session = daemons().session()
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"w": there(0, numbers(1))})
        assert checkpointer.wait()
        (first,) = cuda.calls("register")
        session.drop_connections()
        checkpointer.save(2, {"w": there(0, numbers(2))})
        assert checkpointer.wait()
        gc.collect()
        soon(lambda: len(cuda.calls("unregister")) == 1)
        (back,) = cuda.calls("unregister")
        assert (back.at, back.error, back.thread) == (first.at, 0, first.thread)
        (_, second) = cuda.calls("register")
        assert same(checkpointer.load_all()["w"], numbers(2))
    # With the session, all of it.
    del checkpointer, session
    gc.collect()
    soon(lambda: len(cuda.calls("unregister")) == 2 and not is_mapped(second))
    assert cuda.calls("unregister")[1].at == second.at


@with_gpus
def test_a_trainer_that_is_interrupted_meanwhile_leaves_nothing_page_locked(session, cuda, monkeypatch):
    from storaged.torch import _devices

    real = _devices.register
    # Whoever is started in a shell's background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def slow(*arguments):
        _thread.interrupt_main()
        time.sleep(0.3)
        return real(*arguments)

    with Checkpointer(session=session) as checkpointer:
        monkeypatch.setattr(_devices, "register", slow)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, {"w": there(0, numbers(1))})
        monkeypatch.undo()
        signal.signal(signal.SIGINT, before)
        soon(lambda: len(cuda.calls("unregister")) == 1)
        assert cuda.calls("unregister")[0].at == cuda.calls("register")[0].at
        checkpointer.save(2, {"w": there(0, numbers(2))})
        assert checkpointer.wait() and same(checkpointer.load_all()["w"], numbers(2))


AT_THE_END = """
import atexit, sys
sys.path[:0] = {paths!r}
import cudart as runtime
one = runtime.Cuda()
# Registered first, so called last.
atexit.register(lambda: print("\\n".join(call.text for call in one.calls()), flush=True))
import torch
from storaged import Session
from storaged.torch import Checkpointer
checkpointer = Checkpointer(session=Session("job", socket={socket!r}, token=b"a-secret-of-tests"))
checkpointer.save(1, {{"w": torch.ones(9, device="cpu").to("cuda:1")}}, background=True)
checkpointer.wait()
checkpointer.save(2, {{"w": torch.ones(9, device="cpu").to("cuda:1")}}, background=True)
"""


@with_gpus
def test_it_is_given_back_at_the_end_of_the_process(daemons, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(AT_THE_END.format(paths=sys.path, socket=str(daemons().socket)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    calls = [runtime.Call(line) for line in done.stdout.splitlines()]
    locked, back = ([call.at for call in calls if call.name == name] for name in ("register", "unregister"))
    assert done.returncode == 0 and locked and sorted(locked) == sorted(back), done.stdout + done.stderr
    assert not [call for call in calls if call.text.startswith("WRONG")]
    assert calls.index([call for call in calls if call.name == "copy"][-1]) < calls.index([call for call in calls if call.name == "unregister"][0])


def give_blocks_back():
    """What PyTorch keeps for the next time, once no stream has anything to do with it."""
    for device in range(2):
        torch.cuda.synchronize(device)
    torch._C._host_emptyCache()


@with_gpus
@pytest.mark.parametrize("refused", ["slots", "all"])
@pytest.mark.parametrize("background", [False, True])
def test_a_slot_that_cannot_be_page_locked_fails_no_save(session, cuda, monkeypatch, caplog, refused, background):
    from storaged.torch import _behind

    monkeypatch.setattr(_behind, "BLOCK_BYTES", 4096)
    give_blocks_back()
    cuda.refuse(register=2, host_alloc=2 if refused == "all" else 0)
    state = {f"w{at}": there(at % 2, numbers(at, 3 + 700 * at)) for at in range(6)} | {"bits": there(0, torch.tensor([True, False]))}
    with Checkpointer(session=session, background=background) as checkpointer, caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            trained(state["w5"], numbers(step, 3503))
            cuda.forget()
            checkpointer.save(step, state).staged.result(20)
            # What CUDA refused is not this thread's: its next copy on a device does not raise it.
            trained(there(0, numbers(0)), numbers(1))
            assert checkpointer.wait()
            how = "pageable" if refused == "all" else "locked"
            copies = cuda.copies("to-host")
            assert copies and all(how in call.text and call.stream != 0 for call in copies)
            if refused == "slots":
                assert all(call.bytes <= 4096 for call in copies) and sum(call.bytes for call in copies) == 4 * (6 * 3 + 700 * 15) + 2
                assert {call.device for call in copies} == {0, 1}
            loaded = checkpointer.load_all()
            assert same(loaded["w5"], numbers(step, 3503)) and loaded["bits"].tolist() == [True, False]
            assert all(same(loaded[f"w{at}"], numbers(at, 3 + 700 * at)) for at in range(5))
    assert len([record for record in caplog.records if "page-locked" in record.message]) == 1


@with_gpus
def test_two_blocks_take_turns(session, cuda, monkeypatch):
    """While one is emptied, the other is filled: it is given to the device before anybody waits for the first."""
    from storaged.torch import _behind

    monkeypatch.setattr(_behind, "BLOCK_BYTES", 4096)
    cuda.refuse(register=2)
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"w": there(0, numbers(1, 5 * 1024))})
        order = "".join("c" if call.name == "copy" else "w" for call in cuda.calls("copy", "event-synchronize") if "to-device" not in call.text)
        assert order.lstrip("w").startswith("ccwcwcwcww"), order
        assert checkpointer.wait()


@with_gpus
def test_every_device_has_its_own_stream_and_all_are_given_their_copies_before_one_is_waited_for(session, cuda):
    state = {f"w{at}": there(at % 2, numbers(at, 1000)) for at in range(600)} | {"cpu": numbers(1)}
    with Checkpointer(session=session) as checkpointer:
        cuda.forget()
        checkpointer.save(1, state)
        copies, calls = cuda.copies("to-host"), cuda.calls()
        assert len(copies) == 600
        streams = {(call.device, call.stream) for call in copies}
        assert {device for device, _ in streams} == {0, 1} and len(streams) == 2
        synced = [call for call in calls if call.name == "event-synchronize"]
        assert len(synced) == 2 and calls.index(copies[-1]) < calls.index(synced[0])
        assert checkpointer.wait()
        loaded = checkpointer.load_all()
    assert all(same(loaded[f"w{at}"], numbers(at, 1000)) for at in range(600))


@with_gpus
@pytest.mark.parametrize("background", [False, True])
def test_a_copy_that_fails_is_waited_for_before_its_slot_is_given_back(session, cuda, background):
    state = {f"w{at}": there(0, numbers(at)) for at in range(4)}
    with Checkpointer(session=session, background=background, on_error="warn") as checkpointer:
        checkpointer.save(1, state)
        assert checkpointer.wait()
        cuda.forget()
        cuda.refuse(copy=3)
        handle = checkpointer.save(2, state)
        assert not checkpointer.wait() and checkpointer.failed_saves == 1
        assert background or handle is None or handle.staged.exception(10) is not None
        calls, copies = cuda.calls(), cuda.copies("to-host")
        synced = [call for call in calls if call.name == "event-synchronize"]
        assert len(copies) == 3 and synced and calls.index(copies[-1]) < calls.index(synced[-1])
        cuda.refuse()
        checkpointer.save(3, state)
        assert checkpointer.wait() and checkpointer.latest_step() == 3


@with_gpus
@pytest.mark.parametrize("structure", ["unknown", "known"])
def test_memory_that_the_trainer_gives_up_is_not_anybodys_until_it_is_copied(daemons, cuda, structure):
    daemon = daemons()
    with Checkpointer(session=daemon.session(), background=True) as checkpointer:
        checkpointer.save(1, {"w": there(0, numbers(1))} | ({} if structure == "known" else {"x": 1}))
        assert checkpointer.wait()
        state = {"w": there(0, numbers(2))}
        at, kept = state["w"].data_ptr(), weakref.ref(state["w"].untyped_storage())
        with Held(daemon):
            handle = checkpointer.save(2, state)
            state.clear()
            gc.collect()
            others = [there(0, numbers(-9)) for _ in range(3)]
            assert at not in [other.data_ptr() for other in others] and kept() is not None
        handle.staged.result(20)
        assert checkpointer.wait() and same(checkpointer.load_all()["w"], numbers(2))
        gc.collect()
        assert kept() is None, "and no longer"


@with_gpus
def test_what_is_not_in_order_is_put_in_order_on_the_device_beside_the_trainer(session, cuda):
    """The runtime has no kernels, so that their results are not looked at."""
    turned, conjugate = there(1, torch.ones(8, 30)).t(), there(1, torch.ones(50, dtype=torch.complex64)).conj()
    assert conjugate.is_conj() and not turned.is_contiguous()
    with Checkpointer(session=session) as checkpointer:
        for step in (1, 2):
            cuda.forget()
            checkpointer.save(step, {"turned": turned, "conjugate": conjugate})
            copies, kernels = cuda.copies("to-host"), cuda.calls("kernel")
            assert sorted(call.bytes for call in copies) == [400, 960] and all("locked" in call.text for call in copies)
            assert kernels and {call.stream for call in kernels} == {call.stream for call in copies} != {0}
            assert checkpointer.wait()


KINDS = [getattr(torch, name) for name in (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex32", "complex64", "complex128",
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool",
)]


def of_kind(dtype, count=24):
    # Bytes that are a value of every type.
    return (torch.arange(count * dtype.itemsize) % 2).to(torch.uint8).view(dtype)


@with_gpus
@pytest.mark.parametrize("blocks", [False, True])
def test_every_type_goes_to_the_slot_and_back(session, cuda, blocks):
    if blocks:
        cuda.refuse(register=2)
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {str(dtype): there(1, of_kind(dtype)) for dtype in KINDS})
        assert checkpointer.wait()
        into = {str(dtype): there(1, torch.zeros_like(of_kind(dtype).view(torch.uint8)).view(dtype)) for dtype in KINDS}
        cuda.forget()
        assert checkpointer.load(into)["step"] == 1
        assert all("locked" in call.text and call.stream != 0 for call in cuda.copies("to-device"))
    assert all(same(into[str(dtype)].view(torch.uint8), of_kind(dtype).view(torch.uint8)) for dtype in KINDS)


@with_gpus
@pytest.mark.parametrize("room", [64 << 20, 4096, 512])
def test_a_load_goes_through_two_blocks_behind_what_the_streams_were_given(session, cuda, monkeypatch, room):
    from storaged.torch import _landing

    monkeypatch.setattr(_landing, "BLOCK_BYTES", room)

    def state(step):
        return {
            "rows": there(0, numbers(step, 3000).view(300, 10)), "wide": there(1, numbers(step, 2000).view(10, 200)), "cpu": numbers(step, 50),
            "scalar": there(1, torch.tensor(float(step))), "none": there(0, torch.zeros(0, 3)), "small": [there(0, numbers(step, 3)) for _ in range(40)],
        }

    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, state(1))
        assert checkpointer.wait()
        into = state(2)
        cuda.forget()
        # The trainer's stream has it to do yet, and must not do it to what was loaded.
        trained(into["rows"], numbers(77, 3000).view(300, 10))
        given = len(cuda.copies("to-device"))
        assert checkpointer.load(into)["step"] == 1
        copies = cuda.copies("to-device")[given:]
        ordinary = [call for call in copies if "pageable" in call.text]
        # A row that is larger than a block goes the plain way.
        assert [call.bytes for call in ordinary] == ([8000] if room == 512 else [])
        assert all(call.stream != 0 and call.bytes <= room for call in copies if "locked" in call.text)
        assert len([call for call in copies if "locked" in call.text]) == {64 << 20: 43, 4096: 46, 512: 66}[room]
    torch.cuda.synchronize(0)
    expected = state(1)
    for name in ("rows", "wide", "scalar", "none", "cpu"):
        assert torch.equal(into[name].cpu(), expected[name].cpu()), name
    assert all(same(one, numbers(1, 3)) for one in into["small"])


@with_gpus
def test_a_load_without_page_locked_memory_is_a_plain_one(session, cuda):
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"w": there(0, numbers(1))})
        assert checkpointer.wait()
        give_blocks_back()
        cuda.refuse(host_alloc=2)
        into = {"w": there(0, numbers(0))}
        cuda.forget()
        checkpointer.load(into)
        assert cuda.calls("host-alloc") and all("pageable" in call.text for call in cuda.copies("to-device"))
        assert same(into["w"], numbers(1))


@with_gpus
def test_parts_of_rows_and_other_types_land_where_they_belong(cuda, monkeypatch):
    from storaged.torch import _landing
    from storaged.torch._landing import Rows, land

    monkeypatch.setattr(_landing, "BLOCK_BYTES", 1000)
    saved = numbers(0, 40 * 25).view(40, 25)

    def read(parts):
        for offset, address, count in parts:
            torch.frombuffer((runtime.ctypes.c_char * count).from_address(address), dtype=torch.uint8).copy_(
                saved.view(-1).view(torch.uint8)[offset : offset + count]
            )

    part, whole = there(0, torch.zeros(30, 5)), there(0, torch.zeros(40, 25))
    rows = [
        Rows(None, 25 * 4 * 10, torch.Size([30, 25]), torch.float32, [(7, 5)], part),
        Rows(None, 0, torch.Size([40, 25]), torch.float32, [(0, 25)], whole),
    ]
    assert land(0, rows, read) == []
    assert same(part, saved[10:, 7:12]) and same(whole, saved)


@with_gpus
def test_a_load_whose_bytes_are_bad_leaves_nothing_under_way(session, cuda, monkeypatch):
    from storaged.torch import _landing

    monkeypatch.setattr(_landing, "BLOCK_BYTES", 4096)
    into = {"w": there(0, numbers(0))}
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"w": there(0, numbers(1))})
        assert checkpointer.wait()
        turns = iter(range(3))
        real = checkpointer._reader(None)._read.__func__

        def read(self, shard, parts):
            if next(turns, None) is None:
                raise errors.CorruptData("a chunk is not what was saved")
            real(self, shard, parts)

        monkeypatch.setattr("storaged.torch._reader.StoragedReader._read", read)
        cuda.forget()
        with pytest.raises(errors.StoragedError):
            checkpointer.load(into)
        calls, copies = cuda.calls(), cuda.copies("to-device")
        last = [call for call in calls if call.name == "event-synchronize"][-1]
        assert copies and calls.index(copies[-1]) < calls.index(last)


@with_gpus
def test_a_child_of_a_fork_leaves_its_parents_memory_alone(daemons, cuda):
    daemon = daemons()
    session = daemon.session()
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"w": there(0, numbers(1))})
        assert checkpointer.wait()
        cuda.forget()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with Checkpointer(session=daemon.session("child")) as own:
                    own.save(1, {"w": numbers(5)})
                    assert own.wait() and same(own.load_all()["w"], numbers(5))
                # The parent's session too, with a connection of its own.
                session.connect().list("job", 5000)
                session.drop_connections()
                del checkpointer
                gc.collect()
                code = 0 if cuda.calls() == [] else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        checkpointer.save(2, {"w": there(0, numbers(2))})
        assert checkpointer.wait() and cuda.calls("unregister") == [] and same(checkpointer.load_all()["w"], numbers(2))
