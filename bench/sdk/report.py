"""The figures as a table and as bars: an SVG without scripts or fonts of its own."""

from __future__ import annotations

from html import escape

#: What a mark is set for: the figure, at most this, what it is.
MARKS = (
    ("block_vs_memcpy_1t", 1.10, "training blocked by a save, one thread"),
    ("block_vs_memcpy_2t", 0.90, "training blocked by a save, two threads"),
    ("block_background_vs_memcpy", 0.05, "training blocked by a save that copies in the background"),
    ("first_save_vs_later", 3.0, "first save after `prepare`, in ratio to later ones"),
    ("load_vs_memcpy", 1.20, "load, every byte verified, two threads"),
    ("reshard_read_amplification", 1.05, "4 ranks saved, 3 load: bytes opened, in ratio to bytes needed"),
    ("many_tensors_save_ms", 50.0, "10,000 tensors: ms of the training thread per save"),
    ("many_tensors_gil_stall_ms", 10.0, "10,000 tensors: longest ms that another thread waited for the interpreter"),
)
#: The same of what is counted: at least so many.
COUNTS = (
    ("frameworks", 6, "frameworks of which all tests ran and passed: `make frameworks`"),
    ("torch_versions", 6, "versions of torch with which all tests passed: `make torch-versions`"),
)
#: By how long training is blocked: the figure, who, whether it is ours.
BLOCKED = (
    ("block_vs_memcpy_1t", "storaged, Checkpointer, 1 thread", True),
    ("block_vs_memcpy_2t", "storaged, Checkpointer, 2 threads", True),
    ("block_background_vs_memcpy", "storaged, Checkpointer, copying in the background", True),
    ("dcp_async_storaged_block_vs_memcpy", "storaged under dcp.async_save", True),
    ("dcp_sync_storaged_vs_memcpy", "storaged under dcp.save, until committed", True),
    ("dlrover_block_vs_memcpy", "DLRover, its shared memory alone", False),
    ("dcp_async_background_block_vs_memcpy", "dcp.async_save, staging in the background", False),
    ("dcp_async_cached_block_vs_memcpy", "dcp.async_save, stager kept", False),
    ("dcp_async_block_vs_memcpy", "dcp.async_save", False),
    ("hyperpod_block_vs_memcpy", "HyperPod's client on storaged, async_save", False),
    ("torch_save_vs_memcpy", "torch.save to /dev/shm", False),
    ("dcp_sync_shm_vs_memcpy", "dcp.save to /dev/shm", False),
)
ENDED = (
    ("total_vs_memcpy", "storaged, until committed", True),
    ("dcp_async_storaged_total_vs_memcpy", "storaged under dcp.async_save", True),
    ("dcp_async_background_total_vs_memcpy", "dcp.async_save, staging in the background", False),
    ("dcp_async_cached_total_vs_memcpy", "dcp.async_save, stager kept", False),
    ("dcp_async_total_vs_memcpy", "dcp.async_save", False),
    ("hyperpod_total_vs_memcpy", "HyperPod's client on storaged, async_save", False),
)
LOADED = (
    ("load_vs_memcpy_1t", "storaged, verified, 1 thread", True),
    ("load_vs_memcpy", "storaged, verified, 2 threads", True),
    ("dcp_load_storaged_vs_memcpy", "storaged under dcp.load", True),
    ("dcp_load_shm_vs_memcpy", "dcp.load from /dev/shm, not verified", False),
    ("torch_load_vs_memcpy", "torch.load from /dev/shm, not verified", False),
    ("hyperpod_load_vs_memcpy", "HyperPod's client on storaged", False),
)
GROUPS = (("Training is blocked", BLOCKED), ("The save has ended", ENDED), ("Load", LOADED))
WIDTH, LEFT, RIGHT, ROW, TOP = 900, 360, 70, 22, 70
#: Longer bars are cut, and their number tells.
LONGEST = 12.0


def head(figures):
    return f"{figures['machine']}; torch {figures['torch']}; {figures['date']}; commit {figures['commit']}"


def table(figures, missing):
    lines = [
        "# The trainer's side, head to head", "", f"- machine: {figures['machine']}", f"- torch: {figures['torch']}",
        f"- date: {figures['date']}", f"- commit: {figures['commit']}", *(f"- {one}" for one in missing), "",
        f"Made by `make bench-sdk`: {figures['mib']} MiB in 32 tensors on one rank, every method on the same state in one run. A ratio is",
        "to a copy of the same bytes by one thread, made just before and after; README.md explains each key.", "",
        "## Marks", "", "| figure | what | at most | got | met |", "| --- | --- | ---: | ---: | --- |",
    ]
    for key, mark, what in MARKS:
        if key in figures:
            lines.append(f"| `{key}` | {what} | {mark:.2f} | {figures[key]:.2f} | {'yes' if figures[key] <= mark else 'no'} |")
    for key, mark, what in COUNTS:
        if key in figures:
            lines.append(f"| `{key}` | {what} | at least {mark} | {figures[key]} | {'yes' if figures[key] >= mark else 'no'} |")
    for title, rows in GROUPS:
        lines += ["", f"## {title}", "", "| method | in ratio to memcpy |", "| --- | ---: |"]
        lines += [f"| {who} | {figures[key]:.2f} |" for key, who, _ in rows if key in figures]
    lines += ["", "## All figures", "", "| figure | number |", "| --- | ---: |"]
    lines += [f"| `{key}` | {value} |" for key, value in sorted(figures.items()) if isinstance(value, (int, float))]
    return "\n".join(lines) + "\n"


def plot(figures):
    y, body = TOP, []
    unit = (WIDTH - LEFT - RIGHT) / LONGEST
    for title, rows in GROUPS:
        body.append(f'<text x="20" y="{y}" font-weight="bold">{escape(title)}</text>')
        y += 10
        for key, who, is_ours in rows:
            if key not in figures:
                continue
            value, colour = figures[key], "#1b8a5a" if is_ours else "#8a94a6"
            width = max(1.0, unit * min(value, LONGEST))
            body.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(who)}</text>')
            body.append(f'<rect x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}" fill="{colour}"/>')
            body.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + 15}">{value:.2f}</text>')
            y += ROW
        y += 26
    line = f'<line x1="{LEFT + unit:.1f}" y1="{TOP - 8}" x2="{LEFT + unit:.1f}" y2="{y - 30}" stroke="#222" stroke-dasharray="3 3"/>'
    note = f'<text x="{LEFT + unit:.1f}" y="{TOP - 12}" text-anchor="middle" fill="#555">memcpy</text>'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" font-family="sans-serif" '
        'font-size="12" fill="#222">', f'<rect width="{WIDTH}" height="{y}" fill="white"/>',
        f'<text x="20" y="26" font-size="17" font-weight="bold">Saves and loads of {figures["mib"]} MiB, in ratio to one memcpy</text>',
        f'<text x="20" y="44" fill="#555">{escape(head(figures))}</text>', *body, line, note, "</svg>",
    ]) + "\n"
