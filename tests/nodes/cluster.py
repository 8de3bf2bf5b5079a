"""A Kubernetes of the lab's machines: etcd, the API server, controllers and the scheduler beside them, containerd and a kubelet on each.

Release 1.20.2 as `kubernetes.sh` has built it. What real clusters have beside it and this one has not: kube-proxy and DNS, which nothing here
needs (the API server's service address stands on the bridge), admission policies, a cloud.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from lab import BASE, ROOT, Lab, Machine, control_groups, expect, run, until

PROGRAMS = BASE / "kubernetes"
ADDRESS, SERVICE = "10.0.0.250", "10.96.0.1"
SERVER = f"https://{ADDRESS}"
#: Users of the API server, by name and group, as clusters have them.
USERS = {
    "admin": ("admin", "system:masters"), "controllers": ("system:kube-controller-manager", ""), "scheduler": ("system:kube-scheduler", ""),
    "apiserver": ("kube-apiserver", "system:masters"),
}
# What the kubelet sets for the kernel of the whole machine; it leaves alone what is so already.
KERNEL = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1, "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
CONTAINERD = """version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:3.2"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "/etc/cni/net.d"
"""
KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
    "authentication": {"x509": {"clientCAFile": "/etc/kubernetes/ca.pem"}, "anonymous": {"enabled": False}, "webhook": {"enabled": True}},
    "authorization": {"mode": "Webhook"}, "cgroupDriver": "cgroupfs", "failSwapOn": False, "makeIPTablesUtilChains": False,
    # The machines' disks are memory.
    "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"}, "imageGCHighThresholdPercent": 100,
    "nodeStatusUpdateFrequency": "2s", "clusterDNS": [], "resolvConf": "",
    # As deploy/README.md wants it.
    "featureGates": {"GracefulNodeShutdown": True}, "shutdownGracePeriod": "60s", "shutdownGracePeriodCriticalPods": "40s",
}
UNIT = """[Unit]
After=containerd.service
[Service]
ExecStart=/opt/kubernetes/kubelet --config=/etc/kubernetes/kubelet.json --kubeconfig=/etc/kubernetes/kubelet.conf --container-runtime=remote \\
    --container-runtime-endpoint=unix:///run/containerd/containerd.sock --hostname-override={name} --node-ip={address} --v=2
Restart=always
RestartSec=1
"""


def expect_controllers() -> None:
    """Kubernetes 1.20 runs with those of version 1 here."""
    names = [path.name for path in control_groups()]
    expect("memory" in names, "expected the controllers of control groups in hierarchies of version 1 (systemd.unified_cgroup_hierarchy=0 for the kernel)")


class Cluster(Lab):
    """Machines on which a kubelet can run."""

    # Kubernetes 1.20 and containers below it have limits by the controllers of version 1.
    environment = {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "0"}

    def __init__(self, names: list[str], binds: dict[str, Path]):
        super().__init__(names, {**binds, "/opt/kubernetes": PROGRAMS})
        for address in (f"{ADDRESS}/24", f"{SERVICE}/32"):
            run("ip", "address", "add", address, "dev", "lab")
        self.folder = self.memory / "control"
        self.folder.mkdir()
        self.processes: dict[str, subprocess.Popen] = {}
        self.kubeconfig = self.folder / "admin.conf"

    def options_of(self, machine: Machine) -> list[str]:
        # The kernel's keyrings, of which each container gets one, and eBPF are forbidden by default.
        options = ["--capability=all", "--system-call-filter=@keyring bpf", "--bind=/dev/null:/dev/kmsg"]
        for name in ("containerd", "kubelet"):
            # Layers of images lie over one another, which an overlay cannot hold.
            place = machine.folder / name
            place.mkdir(exist_ok=True)
            options.append(f"--bind={place}:/var/lib/{name}")
        return options

    def start(self) -> None:
        """The whole cluster, until all nodes are ready."""
        self._make_certificates()
        self.start_etcd()
        self.start_server()
        as_user = [f"--kubeconfig={self.folder / 'controllers.conf'}", "--leader-elect=false"]
        self._start(
            "kube-controller-manager", *as_user, f"--service-account-private-key-file={self.folder / 'accounts.key'}",
            f"--root-ca-file={self.folder / 'ca.pem'}", "--use-service-account-credentials",
        )
        self._start("kube-scheduler", f"--kubeconfig={self.folder / 'scheduler.conf'}", "--leader-elect=false")
        self.boot()
        for machine in self.machines:
            self.start_kubelet(machine)
        until("nodes ready", self._nodes_are_ready, 120)

    def start_etcd(self) -> None:
        url = "http://127.0.0.1:2379"
        etcd = shutil.which("etcd") or str(ROOT / "target/tools/usr/bin/etcd")
        self._start(etcd, f"--data-dir={self.folder / 'etcd'}", f"--listen-client-urls={url}", f"--advertise-client-urls={url}")

    def start_server(self) -> None:
        folder = self.folder
        self._start(
            "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--secure-port=443", f"--advertise-address={ADDRESS}",
            "--service-cluster-ip-range=10.96.0.0/24", "--service-account-issuer=https://kubernetes.default.svc", "--insecure-port=0",
            f"--service-account-key-file={folder / 'accounts.key'}", f"--service-account-signing-key-file={folder / 'accounts.key'}",
            f"--client-ca-file={folder / 'ca.pem'}", f"--tls-cert-file={folder / 'server.pem'}", f"--tls-private-key-file={folder / 'server.key'}",
            "--authorization-mode=Node,RBAC", "--kubelet-preferred-address-types=InternalIP", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
            f"--kubelet-client-certificate={folder / 'apiserver.pem'}", f"--kubelet-client-key={folder / 'apiserver.key'}",
        )
        until("the API server", self._answers, 60)

    def stop(self, name: str) -> None:
        """Like kill -9."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def end(self) -> None:
        for name in list(self.processes):
            self.stop(name)
        super().end()

    def _start(self, program: str, *arguments: str) -> None:
        path = Path(program) if program.startswith("/") else PROGRAMS / program
        with (self.folder / f"{path.name}.log").open("ab") as log:
            self.processes[path.name] = subprocess.Popen([path, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _answers(self) -> bool | str:
        expect(self.processes["kube-apiserver"].poll() is None, (self.folder / "kube-apiserver.log").read_text(errors="replace")[-3000:])
        done = self.tries("get", "--raw", "/readyz")
        return done.stdout == "ok" or done.stdout + done.stderr

    def _nodes_are_ready(self) -> bool | str:
        got = self.get("nodes")
        ready = [condition["status"] for node in got for condition in node["status"].get("conditions", []) if condition["type"] == "Ready"]
        return ready == ["True"] * len(self.machines) or f"{ready}: {self.machines[0].journal('kubelet')[-2000:]}"

    def _openssl(self, *arguments: str) -> None:
        run("openssl", *arguments, cwd=self.folder)

    def _make_certificates(self) -> None:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=kubernetes")
        self._openssl("genrsa", "-out", "accounts.key", "2048")
        names = f"IP:{ADDRESS},IP:{SERVICE},DNS:kubernetes.default.svc"
        subjects = {"server": ("kube-apiserver", ""), **USERS, **{machine.name: (f"system:node:{machine.name}", "system:nodes") for machine in self.machines}}
        for file, (name, group) in subjects.items():
            (self.folder / "extensions").write_text(f"subjectAltName={names}\n" if file == "server" else "extendedKeyUsage=clientAuth\n")
            subject = (f"/O={group}" if group else "") + f"/CN={name}"
            self._openssl("req", "-new", *curve, "-keyout", f"{file}.key", "-out", "request", "-subj", subject)
            sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
            self._openssl("x509", "-req", "-in", "request", *sign, "-out", f"{file}.pem")
            (self.folder / f"{file}.conf").write_text(json.dumps(self._access(file)))

    def _access(self, user: str) -> dict:
        def data(name: str) -> str:
            return base64.b64encode((self.folder / name).read_bytes()).decode()

        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "lab",
            "clusters": [{"name": "lab", "cluster": {"server": SERVER, "certificate-authority-data": data("ca.pem")}}],
            "users": [{"name": "lab", "user": {"client-certificate-data": data(f"{user}.pem"), "client-key-data": data(f"{user}.key")}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
        }

    def start_kubelet(self, machine: Machine) -> None:
        machine.shell("for one in /sys/fs/cgroup/*; do mount -o remount,bind,rw $one; done; mount --make-rshared /")
        for setting, value in KERNEL.items():
            machine.shell(f"echo {value} >/run/setting-{value}; mount --bind /run/setting-{value} /proc/sys/{setting}")
        machine.write("/etc/containerd/config.toml", CONTAINERD)
        number = machine.address.rpartition(".")[2]
        network = {
            "cniVersion": "0.4.0", "name": "pods", "type": "bridge", "bridge": "pods", "isGateway": True,
            "ipam": {"type": "host-local", "subnet": f"10.1.{number}.0/24"},
        }
        machine.write("/etc/cni/net.d/10-pods.conf", json.dumps(network))
        machine.write("/etc/kubernetes/ca.pem", (self.folder / "ca.pem").read_text())
        machine.write("/etc/kubernetes/kubelet.json", json.dumps(KUBELET))
        machine.write("/etc/kubernetes/kubelet.conf", (self.folder / f"{machine.name}.conf").read_text(), 0o600)
        machine.write("/etc/systemd/system/kubelet.service", UNIT.format(name=machine.name, address=machine.address))
        machine.shell(f"ip route replace {SERVICE}/32 via {ADDRESS}; systemctl daemon-reload; systemctl restart containerd; systemctl start kubelet")

    def load_image(self, image: Path, machines: list[Machine] | None = None) -> None:
        target = self.shared / image.name
        for machine in machines or self.machines:
            machine.does("ctr", "--namespace=k8s.io", "images", "import", f"/shared/{target.name}")

    def kubectl(self, *arguments: str) -> list[str]:
        return [str(PROGRAMS / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]

    def tries(self, *arguments: str, text: str | None = None, limit: float = 120) -> subprocess.CompletedProcess:
        command = self.kubectl(*arguments)
        return subprocess.run(command, input=text or "", capture_output=True, text=True, timeout=limit, check=False)

    def does(self, *arguments: str, text: str | None = None, limit: float = 120) -> str:
        done = self.tries(*arguments, text=text, limit=limit)
        expect(done.returncode == 0, f"kubectl {' '.join(arguments)} ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")
        return done.stdout

    def get(self, *arguments: str) -> list[dict]:
        return json.loads(self.does("get", *arguments, "--output=json"))["items"]


def image(target: Path, name: str, layers: list[Path | dict[str, tuple[bytes, int]]], config: dict) -> None:
    """An archive that containerd imports: layers are archives, or files by their path, with bytes and mode."""
    with tarfile.open(target, "w") as archive:
        def add(path: str, content: bytes) -> None:
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))

        digests = []
        for layer in layers:
            content = layer.read_bytes() if isinstance(layer, Path) else archive_of(layer)
            digests.append(hashlib.sha256(content).hexdigest())
            add(f"{digests[-1]}.tar", content)
        whole = {"architecture": "amd64", "os": "linux", "config": config, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]}}
        text = json.dumps(whole).encode()
        own = f"{hashlib.sha256(text).hexdigest()}.json"
        add(own, text)
        add("manifest.json", json.dumps([{"Config": own, "RepoTags": [name], "Layers": [f"{digest}.tar" for digest in digests]}]).encode())


def archive_of(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, (content, mode) in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def image_of_containerfile(target: Path, name: str, base: Path, files: dict[str, Path]) -> None:
    """The last stage of deploy/container/Containerfile, without a builder: its files over a base that has what its RUN installs."""
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text().replace("\\\n", " ")
    _, _, stage = text.rpartition("\nFROM ")
    layer: dict[str, tuple[bytes, int]] = {}
    config: dict = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
    for line in stage.splitlines()[1:]:
        word, _, rest = line.partition(" ")
        if word == "COPY":
            expect(rest.startswith("--from=build "), line)
            *sources, place = rest.removeprefix("--from=build ").split()
            for source in sources:
                path = Path(source).relative_to("/build")
                own = files.get(str(path), ROOT / path)
                into = place + own.name if place.endswith("/") else place
                layer[into] = (own.read_bytes(), 0o755 if os.access(own, os.X_OK) else 0o644)
        elif word in ("ENTRYPOINT", "CMD"):
            config[word.capitalize()] = json.loads(rest)
        elif word == "USER":
            config["User"] = rest
        elif word == "RUN":
            expect(re.search(r"install .* ca-certificates ", rest) is not None, f"the base has nothing but ca-certificates: {line}")
        else:
            expect(not word or word.startswith("#"), f"an instruction that is not known here: {line}")
    image(target, name, [base, layer], config)


@contextlib.contextmanager
def away(cluster: Cluster):
    """No API server meanwhile; it was killed."""
    cluster.stop("kube-apiserver")
    try:
        yield
    finally:
        cluster.start_server()
