import pytest
from daemon import ON_REQUEST, Daemon, cluster


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory):
    """One node with a durable tier, for tests that take a namespace each and leave it alone."""
    daemon = Daemon(tmp_path_factory.mktemp("node"), '[durable]\nkind = "directory"\npath = "TIER"\n', budget="1GiB")
    yield daemon
    daemon.kill()


@pytest.fixture
def session(shared_daemon, request):
    """A namespace of the test's own."""
    # Its end tells the cases of one test apart.
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[-60:].strip("-")
    return shared_daemon.session(name)


@pytest.fixture
def daemons(tmp_path):
    """Makes nodes of the test's own, to be stopped and killed."""
    made = []

    def make(extra="", **settings):
        made.append(Daemon(tmp_path / f"node-{len(made)}", extra, **settings))
        return made[-1]

    yield make
    for daemon in made:
        daemon.kill()


@pytest.fixture
def nodes(tmp_path):
    """Three nodes, (2,1), with a durable tier for what is asked for."""
    made = cluster(tmp_path / "nodes", 3, 2, 1, ON_REQUEST)
    for one in made:
        one.newest_state = "protected"
    yield made
    for one in made:
        one.kill()
