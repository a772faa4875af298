document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search");
// A wide table scrolls; without a mouse that needs the focus. The theme wraps tables after it has loaded.
addEventListener("load", () => setTimeout(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}));
