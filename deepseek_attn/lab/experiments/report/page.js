// Sorts a table by the column whose head is clicked, and hides a variant's curves where its number is clicked.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head) return;
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent.trim();
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if ([x, y].some((text) => text === "" || text === "-")) return (x === "" || x === "-") - (y === "" || y === "-");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}
const hidden = new Set();
for (const button of document.querySelectorAll("button[data-variant]")) {
  button.addEventListener("click", () => {
    const number = button.dataset.variant;
    if (!hidden.delete(number)) hidden.add(number);
    button.setAttribute("aria-pressed", hidden.has(number));
    for (const part of document.querySelectorAll('figure svg [id*="-v"]')) {
      const numbers = [...part.id.matchAll(/-v(\d+)(?=-)/g)].map((found) => found[1]);
      if (numbers.length) part.style.display = numbers.every((found) => hidden.has(found)) ? "none" : "";
    }
  });
}
