"use strict";
// Headers become buttons that sort by their column: upwards, then downwards. Numbers stand in
// data-value; what is not there goes last either way.
for (const table of document.querySelectorAll("table")) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") === "ascending";
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column];
        return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
      };
      const missing = (row) => row.cells[column].classList.contains("missing");
      const before = (a, b) => {
        if (missing(a) || missing(b)) return missing(a) - missing(b);
        const [x, y] = [key(a), key(b)];
        const order = typeof x === "number" && typeof y === "number"
          ? (x > y) - (x < y)
          : String(x).localeCompare(String(y), "en", { numeric: true });
        return down ? -order : order;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(before));
    });
  });
}
