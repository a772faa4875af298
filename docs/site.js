document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search");
