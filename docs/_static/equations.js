// Render the equations of a page, with the KaTeX that is served beside this file.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".math")) {
    katex.render(element.textContent, element, {
      displayMode: element.classList.contains("display"),
      throwOnError: false,
    });
  }
});
