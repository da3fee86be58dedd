"""The free pages of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

NULL_PAGE = 0


class PageAllocator:
    """Free list with reference counts; page 0 is never handed out."""

    def __init__(self, pages: int):
        self._pages = pages
        self.recount([])

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        self._references[page] += 1

    def references(self, page: int) -> int:
        return self._references[page]

    def release(self, page: int) -> None:
        self._references[page] -= 1
        if not self._references[page]:
            del self._references[page]
            self._free.append(page)

    def recount(self, held: Iterable[int]) -> None:
        """Recomputes counts and free list from the holders of pages; a page counts once per holder."""
        self._references: dict[int, int] = dict(Counter(held))
        self._free = [page for page in range(self._pages - 1, NULL_PAGE, -1) if page not in self._references]


class OutOfPages(RuntimeError):
    """A pool has no free page. The caches are as they were."""
