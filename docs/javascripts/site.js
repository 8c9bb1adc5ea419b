// What scrolls can be reached by keyboard, and the buttons of each code block have a name of their own.
function reachable() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
  document.querySelectorAll("nav.md-code__nav").forEach((buttons, number) => {
    buttons.ariaLabel = `code block ${number + 1}`;
  });
}
addEventListener("load", reachable);
addEventListener("resize", reachable);
