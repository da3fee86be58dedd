"""The free pages of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import length_hint

NULL_PAGE = 0


class PageAllocator:
    """Free list with reference counts; page 0 is never handed out. ``_unused``: pages above all that were held."""

    def __init__(self, pages: int):
        self._pages = pages
        self.recount([])

    @property
    def available(self) -> int:
        return len(self._free) + length_hint(self._unused)

    def allocate(self) -> int:
        page = self._free.pop() if self._free else next(self._unused)
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
        last = max(self._references, default=NULL_PAGE)
        self._free = [page for page in range(last, NULL_PAGE, -1) if page not in self._references]
        self._unused = iter(range(last + 1, self._pages))


class OutOfPages(RuntimeError):
    """A pool has no free page. The caches are as they were."""
