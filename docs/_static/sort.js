// Tables in an element of class sortable are sorted by a click on a cell of their header. Numbers are
// compared as numbers, also after ≤, and come before texts such as "1 of 3 diverged".
document.addEventListener("DOMContentLoaded", () => {
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim().replace("−", "-").replace(/^≤ /, "");
    const number = text.includes(" of ") ? NaN : parseFloat(text);
    return Number.isNaN(number) ? text : number;
  };
  const order = (a, b) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return typeof a === "number" ? a - b : a.localeCompare(b);
  };
  for (const table of document.querySelectorAll(".sortable table")) {
    const header = table.tHead && table.tHead.rows[0];
    if (!header) continue;
    Array.from(header.cells).forEach((cell, column) => {
      let sign = -1;
      cell.style.cursor = "pointer";
      cell.title = "sort";
      cell.addEventListener("click", () => {
        sign = -sign;
        const body = table.tBodies[0];
        Array.from(body.rows)
          .sort((a, b) => sign * order(value(a, column), value(b, column)))
          .forEach((row) => body.appendChild(row));
      });
    });
  }
});
