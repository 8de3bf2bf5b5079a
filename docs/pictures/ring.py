"""Draws ring.svg: a group of eight data nodes and two coding nodes, and how one stripe's parity is made along them.

    python3 docs/pictures/ring.py > docs/pictures/ring.svg
"""

from math import cos, pi, sin

WIDTH, HEIGHT, CENTRE, RADIUS, NODE = 760, 420, (250, 210), 160, 30
DATA, CODING = 8, 2
STYLE = """
text { font: 13px sans-serif; fill: #222; text-anchor: middle }
.left { text-anchor: start } .small { font-size: 11px; fill: #555 } .name { font-weight: bold }
.data { fill: #dce9f7; stroke: #2b6cb0 } .coding { fill: #fbe3c8; stroke: #b7791f } circle { stroke-width: 1.5 }
.hop { stroke: #2b6cb0; stroke-width: 2; marker-end: url(#head) } .up { stroke: #888; stroke-dasharray: 4 3; marker-end: url(#grey) }
"""


def place(index):
    """Where a node stands: the first at the top, clockwise."""
    angle = 2 * pi * index / (DATA + CODING) - pi / 2
    return CENTRE[0] + RADIUS * cos(angle), CENTRE[1] + RADIUS * sin(angle)


def hop(one, other):
    """An arrow between the rims of two nodes."""
    (x1, y1), (x2, y2) = one, other
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length * (NODE + 3), (y2 - y1) / length * (NODE + 3)
    return f'<line class="hop" x1="{x1 + dx:.0f}" y1="{y1 + dy:.0f}" x2="{x2 - dx:.0f}" y2="{y2 - dy:.0f}"/>'


def node(index):
    x, y = place(index)
    kind, name = ("data", f"node {index + 1}") if index < DATA else ("coding", f"parity {index - DATA + 1}")
    return f'<circle class="{kind}" cx="{x:.0f}" cy="{y:.0f}" r="{NODE}"/><text x="{x:.0f}" y="{y + 4:.0f}">{name}</text>'


def head(name, colour):
    shape = '<path d="M0,0 L8,4 L0,8 z"'
    return f'<marker id="{name}" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">{shape} fill="{colour}"/></marker>'


LINES = [
    ("name", "1. stage"), ("small", "each rank copies its shard into its node's RAM"), ("small", "and trains on"),
    ("name", "2. encode"), ("small", "every node adds its block, times a coefficient,"), ("small", "to the sums that it got, and passes them on"),
    ("name", "3. protected"), ("small", "any two of the ten nodes may vanish"), ("small", "for 2/8 of the step's size in redundancy"),
    ("name", "4. trickle"), ("small", "the nodes copy their shards to S3,"), ("small", "behind the training loop"),
    ("name", "5. restore"), ("small", "own RAM, a peer's, decoding, or S3:"), ("small", "said beforehand, every byte verified"),
]


def main():
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">')
    print("<title>A group of eight data nodes and two coding nodes</title>")
    print(f"<style>{STYLE}</style><defs>{head('head', '#2b6cb0')}{head('grey', '#888')}</defs>")
    print(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for index in range(DATA + CODING):
        if index + 1 < DATA + CODING:
            print(hop(place(index), place(index + 1)))
        print(node(index))
    x, y = CENTRE
    print(f'<text class="name" x="{x}" y="{y - 4}">S3 or a directory</text><text class="small" x="{x}" y="{y + 14}">durable copies</text>')
    for index in range(DATA):
        nx, ny = place(index)
        print(f'<line class="up" x1="{nx + (x - nx) * 0.24:.0f}" y1="{ny + (y - ny) * 0.24:.0f}" ', end="")
        print(f'x2="{nx + (x - nx) * 0.58:.0f}" y2="{ny + (y - ny) * 0.58:.0f}"/>')
    for line, (kind, text) in enumerate(LINES):
        print(f'<text class="left {kind}" x="{470 if kind == "name" else 486}" y="{46 + line * 24}">{text}</text>')
    print("</svg>")


main()
