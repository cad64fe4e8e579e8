"use strict";
// Table headers become buttons that sort by their column, first ascending, then descending. Numbers
// are read from data-value; rows without a value come last in both orders.
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
// Names in the legend become buttons that hide a curve in all figures. Each figure shows the numbers
// of the point that is nearest to the pointer or was chosen by arrow keys.
const SVG = "http://www.w3.org/2000/svg";
const hidden = new Set(), redraws = [];
for (const item of document.querySelectorAll(".legend > span")) {
  const button = document.createElement("button"), name = item.textContent;
  button.type = "button";
  button.setAttribute("aria-pressed", "true");
  button.style.setProperty("--curve", item.style.getPropertyValue("--curve"));
  button.dataset.mark = item.dataset.mark;
  button.textContent = name;
  button.addEventListener("click", () => {
    if (!hidden.delete(name)) hidden.add(name);
    button.setAttribute("aria-pressed", String(!hidden.has(name)));
    redraws.forEach((redraw) => redraw());
  });
  item.replaceWith(button);
}
for (const figure of document.querySelectorAll("figure:has(script.curves)")) {
  const curves = JSON.parse(figure.querySelector("script.curves").textContent);
  const card = figure.querySelector(".card"), drawing = card.querySelector("svg");
  const lines = curves.map((_, i) => drawing.querySelector(`[data-series="${i}"]`));
  const shown = (i) => !hidden.has(curves[i].name);
  const dot = document.createElementNS(SVG, "circle");
  dot.setAttribute("r", 5);
  dot.setAttribute("class", "dot");
  const readout = document.createElement("output");
  readout.className = "readout";
  let selected = null; // [curve, point]
  const select = (next) => {
    selected = next;
    if (!selected) {
      dot.remove();
      readout.replaceChildren();
      return;
    }
    const curve = curves[selected[0]], [right, down, x, y, half] = curve.points[selected[1]];
    dot.setAttribute("cx", right);
    dot.setAttribute("cy", down);
    dot.style.fill = curve.color;
    drawing.append(dot);
    const number = (value, digits) => value.toLocaleString("en", { maximumSignificantDigits: digits });
    readout.textContent = `${curve.name}: ${number(x, 6)} → ${number(y, 5)}` +
      (half ? ` ± ${number(half, 2)}` : "");
  };
  redraws.push(() => {
    lines.forEach((line, i) => { if (line) line.style.display = shown(i) ? "" : "none"; });
    if (selected && !shown(selected[0])) select(null);
  });
  drawing.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY)
      .matrixTransform(drawing.getScreenCTM().inverse());
    let nearest = 32, next = null;
    curves.forEach((curve, i) => shown(i) && curve.points.forEach(([right, down], j) => {
      const distance = Math.hypot(right - at.x, down - at.y);
      if (distance < nearest) [nearest, next] = [distance, [i, j]];
    }));
    select(next);
  });
  drawing.addEventListener("pointerleave", () => select(null));
  card.tabIndex = 0;
  card.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const jump = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step && !jump) return;
    event.preventDefault();
    const choices = curves.map((_, i) => i).filter((i) => shown(i) && curves[i].points.length);
    if (!choices.length) return;
    let [i, j] = selected ?? [choices[0], step ? (step > 0 ? -1 : 1) : 0];
    if (jump && selected) i = choices[(choices.indexOf(i) + jump + choices.length) % choices.length];
    j = Math.min(Math.max(j + (step ?? 0), 0), curves[i].points.length - 1);
    select([i, j]);
  });
  card.after(readout);
}
