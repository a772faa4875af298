const filter = document.getElementById("filter");
if (filter) {
  filter.hidden = false;
  filter.addEventListener("click", (event) => {
    const chosen = event.target.closest("button");
    if (!chosen) return;
    for (const button of filter.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button === chosen));
    }
    for (const task of document.querySelectorAll("section.task")) {
      task.hidden = chosen.dataset.task !== "" && chosen.dataset.task !== task.id;
    }
  });
}
