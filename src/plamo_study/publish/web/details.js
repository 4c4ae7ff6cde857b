"use strict";
// Opens folded sections where a link leads into one, and all that is folded on paper.

// The element that a link's part behind "#" names, if any; it may be written by anybody.
function named(hash) {
  try {
    return document.getElementById(decodeURIComponent(hash.slice(1)));
  } catch {
    return null;
  }
}

// Opens all that is folded around an element; true where something was.
function reveal(target) {
  let opened = false;
  for (let fold = target && target.closest("details"); fold; fold = fold.parentElement.closest("details")) {
    opened = opened || !fold.open;
    fold.open = true;
  }
  return opened;
}

function arrive() {
  const target = named(location.hash);
  if (reveal(target)) target.scrollIntoView();
}

let printed = []; // opened for the paper alone
window.addEventListener("beforeprint", () => {
  printed = [...document.querySelectorAll("details:not([open])")];
  for (const fold of printed) fold.open = true;
});
window.addEventListener("afterprint", () => {
  for (const fold of printed) fold.open = false;
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']"); // also a second time, when the address stays as it is
  if (link) reveal(named(link.hash));
});
window.addEventListener("hashchange", arrive);
arrive();
