"""Balance of a KV pool: every page is in exactly one place. A leak is an error with detail. [R13] [R31]"""

import numpy as np

from glm53d.kv.pages import PagePool
from glm53d.kv.prefix import PrefixTree

_SHOWN = 8


def check(pool: PagePool, tree: PrefixTree, owned_pages: np.ndarray) -> None:
    """Raise RuntimeError unless each page is free, in the tree, or owned by one request, and the tree is whole.

    Args:
        owned_pages: int32, of all requests together: the pages each alone may write and must free.
    """
    tree.check()
    places = {"free": pool.free_pages, "tree": tree.all_pages(), "owned": owned_pages}
    for place, pages in places.items():
        if len(pages) and not 0 <= pages.min() <= pages.max() < pool.num_pages:
            raise RuntimeError(f"{place}: page {pages.min()} or {pages.max()} is outside the pool of {pool.num_pages}")
    counts = {place: np.bincount(pages, minlength=pool.num_pages) for place, pages in places.items()}
    total = counts["free"] + counts["tree"] + counts["owned"]
    wrong = np.flatnonzero(total != 1)
    if len(wrong) == 0:
        return
    detail = ", ".join(f"page {page} {_where(page, counts)}" for page in wrong[:_SHOWN])
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    sizes = ", ".join(f"{len(pages)} {place}" for place, pages in places.items())
    raise RuntimeError(f"pages out of balance ({sizes}, {pool.num_pages} in all): {detail}{more}")


def _where(page: int, counts: dict[str, np.ndarray]) -> str:
    found = [f"{place} x{count[page]}" for place, count in counts.items() if count[page]]
    return "in " + " and ".join(found) if found else "lost"
