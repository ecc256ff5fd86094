"""Prefix caching: page hashes, and the match of a prompt that is wholly cached, in few and in many nodes.

    python -m bench.micro.tree [--sizes 1000,100000,1000000]

CPU µs per prompt, page size 64. The alternative is the plain Python way: BLAKE2b of each page chained, and a dictionary
from hash to page, asked page by page until one is missing. "512 nodes" has the same prompt split as other prompts that
share some of it would have split it. "index" is what a slower tier is asked with: host memory, or the folder of files.
"""

import hashlib
from functools import partial

import numpy as np

from bench.measure import Row, make_parser, report, timed_row
from glm53d._native import PrefixTree, TierIndex, page_hashes

PAGE = 64
KEY, SEED = bytes(range(16)), bytes(16)
NUM_INDEXED = 100_000  # pages in an index, at least
AIMS_US = {1_000_000: {"hash": 2_000.0, "match": 500.0}}


def measure(sizes: list[int], rounds: int) -> list[Row]:
    """Hash, then match with 1 and with up to 512 nodes, for each size."""
    rows = []
    for size in sizes:
        ids = np.random.default_rng(size).integers(0, 150_000, size, dtype=np.int32)
        aims = AIMS_US.get(size, {})
        hashes = page_hashes(ids, PAGE, KEY, SEED)
        rows.append(
            timed_row(
                f"hash pages of {size:,} tokens",
                partial(page_hashes, ids, PAGE, KEY, SEED),
                rounds=rounds,
                against=("hashlib.blake2b chain", partial(chain, ids)),
                aim=aims.get("hash"),
            )
        )
        cached = {digest: page for page, digest in enumerate(chain(ids))}
        keys = list(cached)
        for nodes in (1, min(512, len(hashes))):
            tree = cached_in(nodes, hashes)
            rows.append(
                timed_row(
                    f"match {size:,} cached tokens, {tree.num_nodes} nodes",
                    partial(tree.match, hashes, 2),
                    rounds=rounds,
                    against=("dict, page by page", partial(lookup, cached, keys)),
                    aim=aims.get("match"),
                )
            )
        index = indexed(hashes)
        rows.append(
            timed_row(
                f"count {size:,} tokens in an index of {len(index):,} pages",
                partial(index.count, hashes),
                rounds=rounds,
                against=("dict, page by page", partial(lookup, cached, keys)),
                aim=aims.get("match"),
            )
        )
    return rows


def indexed(hashes: np.ndarray) -> TierIndex:
    """An index that has all these pages among many others."""
    others = np.random.default_rng(1).integers(0, 1 << 63, (NUM_INDEXED, 2), np.uint64)
    index = TierIndex(len(others) + len(hashes))
    index.add(others, False)
    index.add(hashes, False)
    if index.count(hashes) != len(hashes):
        raise SystemExit("the index lacks pages")
    return index


def cached_in(nodes: int, hashes: np.ndarray) -> PrefixTree:
    """A tree that holds all these pages in one line of so many nodes."""
    tree = PrefixTree()
    tree.insert(0, hashes, np.arange(len(hashes), dtype=np.int32), 1)
    for cut in np.linspace(0, len(hashes), nodes + 1)[1:-1].astype(int):
        tree.match(hashes[:cut], 1)  # splits the node it ends in
    if tree.num_nodes != nodes or tree.match(hashes, 1)[0] != len(hashes):
        raise SystemExit(f"the tree has {tree.num_nodes} nodes, not {nodes}, or lacks pages")
    return tree


def chain(ids: np.ndarray) -> list[bytes]:
    """The digests of all full pages, each depending on all before it."""
    digests, last, data = [], SEED, ids.tobytes()
    for start in range(0, len(ids) // PAGE * PAGE * 4, PAGE * 4):
        last = hashlib.blake2b(last + data[start : start + PAGE * 4], digest_size=16, key=KEY).digest()
        digests.append(last)
    return digests


def lookup(cached: dict[bytes, int], keys: list[bytes]) -> list[int]:
    """The cached pages of the longest prefix."""
    pages = []
    for key in keys:
        page = cached.get(key)
        if page is None:
            break
        pages.append(page)
    return pages


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", default="1000,100000,1000000", help="tokens, separated by commas")
    args = parser.parse_args()
    report("prefix tree", measure([int(size) for size in args.sizes.split(",")], args.rounds), args.json)


if __name__ == "__main__":
    main()
