"""Which pages of one KV pool are free. Numbers only: their content lies on the device, its meaning the tree knows."""

import numpy as np


class PagePool:
    """A stack of free page numbers. Owned by one scheduler. [R13]

    A page that is not free belongs to exactly one request or to the prefix tree; books.check() proves it. With debug, a
    free of a free page raises at once; without, it is caught when the stack would outgrow the pool, or by the books.
    """

    def __init__(self, num_pages: int, debug: bool = False):
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # lowest page on top
        self._num_free = num_pages
        self._is_free = np.ones(num_pages, bool) if debug else None

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def free_pages(self) -> np.ndarray:
        """The free pages' numbers, int32; a view, good until the next alloc or free."""
        return self._stack[: self._num_free]

    def alloc(self, n: int) -> np.ndarray | None:
        """Take n pages, int32 [n]; None, and nothing taken, when there are fewer."""
        if n > self._num_free:
            return None
        pages = self._stack[self._num_free - n : self._num_free][::-1].copy()
        self._num_free -= n
        if self._is_free is not None:
            self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Give pages back, by whoever owned them. Raises RuntimeError when one was free already."""
        if self._is_free is not None:
            again = pages[self._is_free[pages]]
            if len(again) or len(np.unique(pages)) < len(pages):
                raise RuntimeError(f"freed twice: pages {again.tolist() or pages.tolist()}")
            self._is_free[pages] = True
        end = self._num_free + len(pages)
        if end > self.num_pages:
            raise RuntimeError(f"{end} pages free of {self.num_pages}: some were freed twice")
        self._stack[self._num_free : end] = pages
        self._num_free = end
