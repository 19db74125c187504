// Tells each cell of a wide table the name of its column, for tables.css.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const names = [...table.querySelectorAll("thead th")].map((one) => one.textContent.trim());
    if (names.length < 3) continue;
    table.classList.add("by-rows");
    if (names.length > 4) table.classList.add("many");
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, at) => { cell.dataset.column = names[at] || ""; });
    }
  }
});
