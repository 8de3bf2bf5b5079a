"""The HTTP interface for HyperPod's clients, path by path, against the real daemon."""

import base64
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import hyper
import pytest
from daemon import Daemon, cluster, flip, free_port
from hyper import Http


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("hyper"), free_port()
    more = 'save_wait = "2s"'
    tier = '[durable]\nkind = "directory"\npath = "TIER"\n'
    daemon = Daemon(folder, hyper.section(folder, port, more) + tier, budget="256MiB")
    daemon.http = Http(port)
    yield daemon
    daemon.kill()


@pytest.fixture
def http(node):
    return node.http


@pytest.fixture
def name(request):
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[-40:]


def settled_memory(node):
    """What is used once it is told: the status lags behind by a second or more on a busy machine, and would lack what tests before this took."""
    told = []
    while len(told) < 4 or len(set(told[-4:])) > 1:
        told.append(node.status()["memory"]["used"])
        time.sleep(0.7)
    return told[-1]


def checksum(http, name, rank, step):
    return json.loads(http.get(name, rank, step).headers["Shard-Meta"])["checksum"]


def test_health_needs_no_token_and_all_else_does(node, http):
    nobody = Http(http.port, token=None)
    assert nobody.ask("GET", "/health").json == {"status": "healthy"}
    for token in (None, "other", ""):
        answer = Http(http.port, token).namespace("a")
        assert answer.error == (401, "unauthorized")
        assert answer.headers["WWW-Authenticate"].startswith("Basic")
    basic = base64.b64encode(f"anybody:{hyper.TOKEN}".encode()).decode()
    answer = nobody.ask("GET", "/v1/cp/namespaces/not-there", headers={"Authorization": f"Basic {basic}"})
    assert answer.error == (404, "namespace_not_found")
    assert nobody.ask("POST", "/v1/cp/cluster/reset").status == 401


def test_what_is_no_path_or_name_is_refused(http):
    assert http.ask("GET", "/v1/cp/other").error == (404, "no_such_path")
    assert http.ask("PUT", "/v1/cp/namespaces/a").error == (405, "no_such_method")
    for path in ("namespaces/a.b", f"namespaces/{'a' * 64}", "namespaces/%20", "checkpoints/a/x/1", "checkpoints/a/0/-1",
                 "checkpoints/a/0/1x", "checkpoints/a/latest?limit=many", "checkpoints/a/4294967296/1"):
        assert http.ask("GET", f"/v1/cp/{path}").error == (400, "malformed"), path
    for query in ("", "?num_ranks=0", "?num_ranks=x", "?num_ranks=2&steps_retained=0", "?num_ranks=999999"):
        assert http.ask("POST", f"/v1/cp/namespaces/a{query}").error == (400, "malformed"), query


def test_a_namespace_is_made_once_and_says_what_it_was_made_with(http, name):
    assert http.namespace(name).error == (404, "namespace_not_found")
    assert http.latest(name).error == (404, "namespace_not_found")
    assert http.put(name, 0, 1, b"x").error == (404, "namespace_not_found")
    assert http.create(name, 3, 2).json == {"status": "created"}
    assert http.namespace(name).json == {"num_ranks": 3, "steps_to_retain_per_rank": 2}
    assert http.create(name, 4).error == (409, "namespace_exists")
    assert http.latest(name).json == []
    assert http.put(name, 3, 1, b"x").error == (400, "rank_outside")


def test_a_step_is_there_once_all_ranks_are(http, name):
    http.create(name, 3)
    bodies = [os.urandom(3_000_000), os.urandom(100), b"metadata"]
    for rank in (0, 1):
        assert http.put(name, rank, 7, bodies[rank]).json["state"] == "staged"
        assert http.latest(name).json == []
        assert http.get(name, rank, 7).error == (404, "checkpoint_not_found")
    assert http.put(name, 2, 7, bodies[2]).json["state"] == "committed"
    assert http.latest(name).json == [7]
    for rank, body in enumerate(bodies):
        answer = http.get(name, rank, 7)
        assert (answer.status, answer.body) == (200, body)
        assert json.loads(answer.headers["Shard-Meta"])["algorithm"] == "xxh3_128"
    assert http.get(name, 3, 7).error == (404, "checkpoint_not_found")
    assert http.get(name, 0, 8).error == (404, "checkpoint_not_found")


def test_a_step_that_a_rank_has_left_out_is_never_offered(http, name):
    http.create(name, 3)
    http.save(name, 1, [b"a", b"b", b"m"])
    http.put(name, 0, 2, b"a2")
    # Its metadata is there, and rank 1 is not: an answer that says so, within the time for it.
    began = time.monotonic()
    answer = http.put(name, 2, 2, b"m2")
    assert answer.error == (503, "not_committed") and "missing [1]" in answer.json["message"], answer
    assert 1.5 < time.monotonic() - began < 10
    assert http.latest(name).json == [1]
    assert http.get(name, 0, 2).status == 404
    assert http.get(name, 0, 1).body == b"a"


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(http, name):
    http.create(name, 1)
    body = os.urandom(1 << 20)
    http.put(name, 0, 1, body)
    right = checksum(http, name, 0, 1)
    assert http.put(name, 0, 2, body, hyper.flipped(right)).error == (422, "checksum_mismatch")
    assert http.latest(name).json == [1]
    assert http.get(name, 0, 2).status == 404
    assert http.put(name, 0, 2, body, right).status == 200
    assert http.latest(name).json[0] == 2
    for header in ("", "{}", "[", '{"checksum": "AA=="}', '{"checksum": 5}', "\u00e9"):
        answer = http.ask("POST", f"/v1/cp/checkpoints/{name}/0/3", body, {"Shard-Meta": header})
        assert answer.error == (400, "malformed"), header


def test_checksums_are_those_of_the_client(http, name):
    http.create(name, 1)
    for step, (body, known) in enumerate(hyper.CHECKSUMS.items()):
        assert http.put(name, 0, step, body, known).status == 200
        answer = http.get(name, 0, step)
        assert (answer.status, answer.body) == (200, body)
        assert answer.headers["Shard-Meta"] == hyper.meta(known)


def test_a_body_that_ends_early_leaves_nothing(node, http, name):
    http.create(name, 1)
    http.save(name, 1, [b"old"])
    used = settled_memory(node)
    head = f"POST /v1/cp/checkpoints/{name}/0/2 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {hyper.TOKEN}\r\n"
    with socket.create_connection(("127.0.0.1", http.port)) as stream:
        stream.sendall(f"{head}Content-Length: 5000000\r\n\r\n".encode() + bytes(1_000_000))
    assert http.latest(name).json == [1]
    assert http.put(name, 0, 2, b"new").status == 200
    assert http.get(name, 0, 2).body == b"new"
    # Two slots beside: what came early has given its own back.
    hyper.until(lambda: node.status()["memory"]["used"] <= used + (10 << 20))


def test_a_body_without_a_length_or_beyond_the_budget_is_refused(http, name):
    http.create(name, 1)
    head = f"POST /v1/cp/checkpoints/{name}/0/1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {hyper.TOKEN}\r\n"
    got = http.raw(f"{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n1\r\nx\r\n0\r\n\r\n".encode())
    assert got.startswith(b"HTTP/1.1 411") and b"length_required" in got, got
    for length in (300 << 20, 2**63):
        got = http.raw(f"{head}Content-Length: {length}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n".encode(), 15)
        assert b"HTTP/1.1 413" in got and b"too_large" in got, got
    assert http.put(name, 0, 1, b"x").status == 200


def test_a_sender_that_does_not_get_on_is_let_go(node, http, name):
    http.create(name, 1)
    head = f"POST /v1/cp/checkpoints/{name}/0/1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {hyper.TOKEN}\r\n"
    began = time.monotonic()
    got = http.raw(f"{head}Content-Length: 5000000\r\n\r\n".encode() + bytes(1000))
    assert got.startswith(b"HTTP/1.1 408") and b"stalled" in got, got
    assert 8 < time.monotonic() - began < 28
    assert http.put(name, 0, 1, b"x").status == 200


def test_ranges(http, name):
    http.create(name, 1)
    body = os.urandom(1_000_000)
    http.save(name, 1, [body])
    for said, first, last in (("bytes=0-0", 0, 0), ("bytes=10-999", 10, 999), ("bytes=999000-", 999_000, 999_999),
                              ("bytes=-10", 999_990, 999_999), ("bytes=300000-700000", 300_000, 700_000)):
        answer = http.get(name, 0, 1, Range=said)
        assert (answer.status, answer.body) == (206, body[first:last + 1]), said
        assert answer.headers["Content-Range"] == f"bytes {first}-{last}/1000000"
    assert http.get(name, 0, 1, Range="bytes=1000000-").error == (416, "range_outside")
    assert http.get(name, 0, 1, Range="bytes=0-1,4-5").body == body


def test_a_step_that_is_sent_again_counts_once(http, name):
    http.create(name, 2)
    http.put(name, 0, 1, b"a")
    http.put(name, 1, 1, b"m")
    sums = [checksum(http, name, rank, 1) for rank in (0, 1)]
    http.put(name, 0, 2, b"a", sums[0])
    # The answer was lost on its way, say.
    assert http.put(name, 0, 2, b"a", sums[0]).status == 200
    assert http.put(name, 1, 2, b"m", sums[1]).json["state"] == "committed"
    assert http.put(name, 1, 2, b"m", sums[1]).json["state"] == "committed"
    assert http.latest(name).json[0] == 2


def test_a_job_that_goes_back_saves_again(http, name):
    http.create(name, 2)
    http.save(name, 10, [b"a10", b"m10"])
    http.save(name, 20, [b"a20", b"m20"])
    assert http.latest(name).json[0] == 20
    http.save(name, 15, [b"a15", b"m15"])
    # 20 is of a past that the job has left: clients would take it for the newest.
    assert http.latest(name).json == [15]
    assert http.get(name, 0, 15).body == b"a15"
    http.save(name, 20, [b"other", b"m"])
    assert http.get(name, 0, 20).body == b"other"


def test_what_a_dead_incarnation_left_is_never_mixed_in(http, name):
    """Rank 0 saved step 30 and died; the next incarnation's rank 1 saves 30 too."""
    http.create(name, 3)
    http.namespace(name)
    http.save(name, 20, [b"a20", b"b20", b"m20"])
    http.namespace(name)
    assert http.put(name, 0, 30, b"dead").status == 200
    # Started again: it reads, and its save begins.
    assert http.latest(name).json == [20]
    http.namespace(name)
    assert http.put(name, 1, 30, b"b30").status == 200
    assert http.put(name, 2, 30, b"m30").error == (503, "not_committed"), "rank 0 of this incarnation has not saved"
    assert http.latest(name).json == [20]
    assert http.put(name, 0, 30, b"a30").status == 200
    hyper.until(lambda: http.latest(name).json[0] == 30)
    assert [http.get(name, rank, 30).body for rank in range(3)] == [b"a30", b"b30", b"m30"]


def test_older_steps_stay_as_many_as_asked_for(http, name):
    http.create(name, 2, 3)
    for step in range(1, 6):
        http.save(name, step, [b"a%d" % step, b"m%d" % step])
    hyper.until(lambda: http.get(name, 0, 2).status == 404)
    assert [http.get(name, 0, step).status for step in range(1, 6)] == [404, 404, 200, 200, 200]
    assert [http.get(name, 1, step).body for step in (3, 4, 5)] == [b"m3", b"m4", b"m5"]
    # A newer one is as safe, so they are not offered.
    assert http.latest(name).json == [5]


def test_older_steps_give_way_where_memory_is_short(tmp_path):
    port = free_port()
    daemon = Daemon(tmp_path, hyper.section(tmp_path, port), budget="128MiB")
    try:
        http, body = Http(port), bytes(30 << 20)
        http.create("job", 1, 9)
        for step in range(1, 9):
            assert http.save("job", step, [body]) == "committed"
        hyper.until(lambda: daemon.status()["memory"]["used"] < 100 << 20)
        assert http.latest("job").json == [8] and http.get("job", 0, 1).status == 404
    finally:
        daemon.kill()


def test_a_shard_is_deleted(http, name):
    http.create(name, 2)
    http.save(name, 1, [b"a", b"m"])
    path = f"/v1/cp/checkpoints/{name}/0/1"
    assert http.ask("DELETE", path).json == {"status": "deleted"}
    assert http.ask("DELETE", path).error == (404, "checkpoint_not_found")
    assert http.get(name, 0, 1).error == (404, "checkpoint_not_found")
    assert http.latest(name).json == []
    http.save(name, 2, [b"a2", b"m2"])
    assert http.latest(name).json == [2]


def test_a_namespace_is_deleted_and_made_anew(node, http, name):
    http.create(name, 2)
    http.save(name, 1, [b"a" * 1000, b"m"])
    path = f"/v1/cp/namespaces/{name}"
    assert http.ask("DELETE", path).json == {"status": "deleted"}
    assert http.ask("DELETE", path).error == (404, "namespace_not_found")
    assert http.namespace(name).status == 404
    assert http.latest(name).status == 404 and http.get(name, 0, 1).status == 404
    assert http.create(name, 4).status == 200
    assert http.namespace(name).json["num_ranks"] == 4
    assert http.latest(name).json == [] and http.get(name, 0, 1).status == 404
    http.save(name, 1, [b"1", b"2", b"3", b"m"])
    assert http.latest(name).json == [1]


def test_capital_letters_make_another_namespace(http):
    for namespace in ("Job_A", "job_a", "JOB-A"):
        assert http.create(namespace, 1).status == 200
        http.save(namespace, 1, [namespace.encode()])
    for namespace in ("Job_A", "job_a", "JOB-A"):
        assert http.get(namespace, 0, 1).body == namespace.encode()


def test_a_full_budget_is_said(tmp_path):
    port = free_port()
    daemon = Daemon(tmp_path, hyper.section(tmp_path, port))
    try:
        http, body = Http(port), bytes(150 << 20)
        http.create("job", 2)
        assert http.put("job", 0, 1, body).status == 200
        answer = http.put("job", 1, 1, body)
        assert answer.error == (507, "budget_full"), answer
        assert "memory.budget" in answer.json["message"]
        assert http.put("job", 1, 1, b"small").json["state"] == "committed"
    finally:
        daemon.kill()


def test_a_namespace_of_another_token_is_not_open(node, http, name):
    node.session(name.lower()).client().open_run(5000)
    assert http.create(name.lower(), 1).error == (403, "wrong_token")


def test_metrics_count_what_came_and_went(node, http, name):
    before = node.metrics()
    http.create(name, 1)
    http.save(name, 1, [bytes(1000)])
    http.get(name, 0, 1)
    http.get(name, 0, 9)
    after = node.metrics()
    grown = {key: after[key] - before[key] for key in after if "hyperpod" in key}
    assert grown["storaged_hyperpod_received_bytes_total"] == grown["storaged_hyperpod_sent_bytes_total"] == 1000
    assert grown['storaged_hyperpod_requests_total{kind="ok"}'] == 3
    assert grown['storaged_hyperpod_requests_total{kind="refused"}'] == 1


def test_a_reset_deletes_every_namespace(tmp_path):
    port = free_port()
    daemon = Daemon(tmp_path, hyper.section(tmp_path, port))
    try:
        http = Http(port)
        for namespace in ("one", "Two"):
            http.create(namespace, 1)
            http.save(namespace, 1, [b"x"])
        assert http.ask("POST", "/v1/cp/cluster/reset").json == {"status": "reset"}
        assert [http.namespace(namespace).status for namespace in ("one", "Two")] == [404, 404]
        assert http.ask("POST", "/v1/cp/cluster/reset").status == 200
    finally:
        daemon.kill()


def test_a_shard_is_in_ram_once(tmp_path):
    """The budget holds it; the daemon's own memory does not grow by it, neither when it comes nor when it goes."""
    port = free_port()
    daemon = Daemon(tmp_path, hyper.section(tmp_path, port))
    try:
        http, body = Http(port), os.urandom(1 << 20) * 90
        http.create("job", 1)
        http.save("job", 1, [b"small"])
        before = daemon.anonymous_bytes()
        http.save("job", 2, [body])
        assert http.get("job", 0, 2).body == body
        assert daemon.anonymous_bytes() < before + (24 << 20)
    finally:
        daemon.kill()


def test_after_the_loss_of_all_ram_the_durable_tier_has_it(tmp_path):
    port = free_port()
    tier = '[durable]\nkind = "directory"\npath = "TIER"\n[trickle]\nevery = 1\n'
    daemon = Daemon(tmp_path, hyper.section(tmp_path, port) + tier)
    try:
        http, bodies = Http(port), [os.urandom(1_000_000), b"metadata"]
        http.create("job", 2)
        for step in (1, 2):
            http.namespace("job")
            http.save("job", step, bodies)
            hyper.until(lambda step=step: list(daemon.tier.glob(f"job/*/step-{step}/storaged.manifest")))
        hyper.until(lambda: list(daemon.tier.glob("job..hp/*/*/storaged.manifest")))
        daemon.kill()
        daemon.start()
        assert http.latest("job").json == [2]
        answers = [http.get("job", rank, 2) for rank in (0, 1)]
        assert [answer.body for answer in answers] == bodies
        assert answers[0].headers["Storaged-Rung"] == "Durable"
        assert http.get("job", 0, 1).body == bodies[0]
        # It goes on, and what is deleted then does not come back from there.
        assert http.namespace("job").json["num_ranks"] == 2
        assert http.save("job", 3, bodies) == "committed"
        assert http.ask("DELETE", "/v1/cp/namespaces/job").status == 200
        assert http.create("job", 2).status == 200
        assert http.latest("job").json == [] and http.get("job", 0, 2).status == 404
    finally:
        daemon.kill()


def test_without_its_section_nobody_listens(tmp_path):
    daemon = Daemon(tmp_path)
    try:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", 9200), timeout=1)
    finally:
        daemon.kill()


@pytest.fixture
def clusters(tmp_path):
    """Makes a cluster whose every node serves the interface."""
    started = []

    def make(k, m, more=""):
        ports = [free_port() for _ in range(3)]
        section = hyper.section(tmp_path, "PORT", f'save_wait = "15s"\n{more}')
        started.extend(cluster(tmp_path, 3, k, m, extra=section, ports=ports))
        for daemon, port in zip(started, ports, strict=True):
            daemon.http = Http(port)
        return started

    yield make
    for daemon in started:
        daemon.kill()


@pytest.fixture
def nodes(clusters):
    return clusters(k=2, m=1)


def test_ranks_on_several_nodes_and_a_node_lost(nodes):
    """Each rank through its own node; after the loss of one every shard comes back, decoded."""
    first, second, third = (daemon.http for daemon in nodes)
    bodies = [os.urandom(2_000_000), os.urandom(1_500_000), os.urandom(5000)]
    assert first.create("job", 3).status == 200
    assert second.create("job", 3).error == (409, "namespace_exists")
    assert third.namespace("job").json["num_ranks"] == 3
    for step in (1, 2):
        assert first.namespace("job").status == 200
        assert second.put("job", 1, step, bodies[1]).status == 200
        assert first.put("job", 0, step, bodies[0]).status == 200
        assert first.put("job", 2, step, bodies[2]).json["state"] == "protected"
    for http in (first, second, third):
        # The other nodes hear a little later than the first that step 2 is protected, and keep step 1 until then.
        hyper.until(lambda http=http: http.latest("job").json == [2])
        assert [http.get("job", rank, 2).body for rank in range(3)] == bodies
    nodes[1].kill()
    for http in (first, third):
        hyper.until(lambda http=http: http.latest("job").status == 200)
        assert http.latest("job").json == [2]
        answers = [http.get("job", rank, 2) for rank in range(3)]
        assert [answer.body for answer in answers] == bodies
        assert answers[1].headers["Storaged-Rung"] == "Decoded" or http is third
    # The ranks of the lost node go on at another one.
    assert first.namespace("job").status == 200
    assert third.put("job", 1, 3, bodies[1]).status == 200
    assert first.put("job", 0, 3, bodies[0]).status == 200
    assert first.put("job", 2, 3, bodies[2]).json["state"] in ("protected", "committed")
    hyper.until(lambda: first.latest("job").json[:1] == [3])
    # And the node that comes back, empty, takes part again.
    nodes[1].start()
    hyper.until(lambda: second.latest("job").json == [3])
    assert first.namespace("job").status == 200
    for http, rank in ((second, 1), (first, 0), (first, 2)):
        assert http.put("job", rank, 4, bodies[rank]).status == 200
    hyper.until(lambda: second.latest("job").json == [4])


def protected_alone(nodes, step):
    """While the third node hangs, a step is committed for some seconds and not protected: what `latest` says meanwhile."""
    first, second, _ = (daemon.http for daemon in nodes)
    nodes[2].stop()
    first.put("job", 0, step, b"a")
    second.put("job", 1, step, b"b")
    with ThreadPoolExecutor() as pool:
        last = pool.submit(first.put, "job", 2, step, b"m")
        hyper.until(lambda: first.get("job", 0, step).status == 200)
        said = [(last.done(), first.latest("job").json)]
        while not last.done():
            said.append((last.done(), first.latest("job").json))
        said.append((True, first.latest("job").json))
    nodes[2].go_on()
    assert last.result().json["state"] == "protected"
    return said


def test_a_step_that_is_not_protected_yet_is_not_offered(clusters):
    nodes = clusters(k=1, m=2)
    first = nodes[0].http
    assert first.create("job", 3).status == 200
    # There is no other step: it is waited for, because nothing would mean to begin from scratch.
    assert {tuple(steps) for _, steps in protected_alone(nodes, 1)} == {(1,)}
    hyper.until(lambda: all(daemon.http.latest("job").json == [1] for daemon in nodes))
    said = protected_alone(nodes, 2)
    assert said[-1] == (True, [2])
    assert [1] in [steps for done, steps in said if not done], said


@pytest.mark.parametrize("offered", ["protected", "committed"])
def test_without_a_coding_node_nothing_is_protected(clusters, offered):
    """Then no step is offered, unless the configuration says that whole ones are."""
    nodes = clusters(k=2, m=1, more=f'latest = "{offered}"')
    first, second, _ = (daemon.http for daemon in nodes)
    assert first.create("job", 3).status == 200
    nodes[2].kill()
    first.put("job", 0, 1, b"a")
    second.put("job", 1, 1, b"b")
    assert first.put("job", 2, 1, b"m").json["state"] == "committed"
    answer = second.latest("job")
    if offered == "protected":
        assert answer.error == (503, "not_protected_yet")
    else:
        assert answer.json == [1]
    assert [second.get("job", rank, 1).body for rank in range(3)] == [b"a", b"b", b"m"]


def test_ranks_of_several_nodes_that_go_back_meet_in_one_run(nodes):
    """Without the question for the namespace: the first that goes back opens a run, the others follow."""
    first, second, third = (daemon.http for daemon in nodes)
    first.create("job", 3)
    for step in (10, 20, 15, 30, 30):
        body = b"%d" % step
        for http, rank in ((second, 1), (third, 0)):
            assert http.put("job", rank, step, body).status == 200
        assert first.put("job", 2, step, body).json["state"] == "protected"
        assert first.latest("job").json == [step]
        assert [http.get("job", rank, step).body for http in (first, second, third) for rank in range(3)] == [body] * 9


def test_a_byte_that_rotted_in_ram_is_never_sent(nodes):
    """The shard comes from elsewhere instead, from its first byte on or in the middle of it."""
    first, second = nodes[0].http, nodes[1].http
    bodies = [os.urandom(5_000_000), os.urandom(5_000_000), b"m"]
    assert first.create("job", 3).status == 200
    assert second.put("job", 1, 1, bodies[1]).status == 200
    assert first.put("job", 0, 1, bodies[0]).status == 200
    assert first.put("job", 2, 1, bodies[2]).json["state"] == "protected"
    for daemon, rank, at in ((nodes[0], 0, 3_500_000), (nodes[1], 1, 10)):
        assert flip(daemon, bodies[rank], at) == 1
        assert daemon.http.get("job", rank, 1).body == bodies[rank]


def test_many_ranks_at_once(node, http, name):
    ranks, steps = 8, 4
    http.create(name, ranks + 1, 1)
    with ThreadPoolExecutor(ranks) as pool:
        for step in range(steps):
            assert http.namespace(name).status == 200
            bodies = [os.urandom(1_000_000 + rank) for rank in range(ranks)]
            answers = list(pool.map(lambda rank, step=step, bodies=bodies: http.put(name, rank, step, bodies[rank]), range(ranks)))
            assert [answer.status for answer in answers] == [200] * ranks
            assert http.put(name, ranks, step, b"m").json["state"] == "committed"
            got = list(pool.map(lambda rank, step=step: http.get(name, rank, step).body, range(ranks)))
            assert got == bodies and http.latest(name).json == [step]
    assert http.ask("DELETE", f"/v1/cp/namespaces/{name}").status == 200


def test_a_namespace_that_is_deleted_is_gone_on_every_node(nodes):
    first, second, third = (daemon.http for daemon in nodes)
    first.create("job", 2)
    first.put("job", 0, 1, b"a")
    assert first.put("job", 1, 1, b"m").json["state"] == "protected"
    assert second.get("job", 0, 1).body == b"a"
    assert third.ask("DELETE", "/v1/cp/namespaces/job").status == 200
    for http in (first, second, third):
        assert http.namespace("job").status == 404 and http.latest("job").status == 404
        assert http.get("job", 0, 1).status == 404
    hyper.until(lambda: all(daemon.status()["memory"]["used"] <= 8 << 20 for daemon in nodes))
