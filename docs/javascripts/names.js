// Names for the parts of the theme that a screen reader meets without one.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
});
