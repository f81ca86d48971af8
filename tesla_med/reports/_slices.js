"use strict";
/* Shows every slice of a case. The slices lie in a script of their own, which is loaded when the case is opened. */
(() => {
  const SVG = "http://www.w3.org/2000/svg", MASKS = ["source", "adapted", "reference"], LAYERS = ["adapted", "source", "reference", "entropy"];
  const whole = document.getElementById("whole");

  function make(name, attributes, parent, space) {
    const made = space ? document.createElementNS(space, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (parent) parent.append(made);
    return made;
  }

  function picture(content, slice, parent) {
    /* Superimposes image, entropy and outlines; the units are half pixels. */
    const { width, height, aspect, crop } = content;
    const size = { width: 2 * width, height: 2 * height, preserveAspectRatio: "none" };
    const label = `Slice ${slice.index + 1} of ${content.count} with the outlines of the masks`;
    const svg = make("svg", { class: "slice", role: "img", "aria-label": label }, parent, SVG);
    svg.dataset.crop = [2 * crop[0], 2 * crop[1] * aspect, 2 * crop[2], 2 * crop[3] * aspect].join(" ");
    svg.dataset.whole = `0 0 ${2 * width} ${2 * height * aspect}`;
    svg.setAttribute("viewBox", whole.checked ? svg.dataset.whole : svg.dataset.crop);
    const plane = make("g", { transform: `scale(1 ${aspect})` }, svg, SVG);
    make("image", { href: slice.image, ...size }, plane, SVG);
    if (slice.entropy) make("image", { href: slice.entropy, class: "entropy", ...size }, plane, SVG);
    for (const role of MASKS) {
      const group = make("g", { class: role }, plane, SVG);
      for (const [value, outline] of Object.entries(slice[role] || {})) {
        if (outline[0] === "M") make("path", { d: outline, class: `c${value}` }, group, SVG);
        else make("image", { href: outline, class: `c${value}`, ...size }, group, SVG);
      }
    }
    return svg;
  }

  function letters(content, parent) {
    for (const letter of content.letters) make("span", { class: "letter" }, parent).textContent = letter;
  }

  function show(section, content) {
    const viewer = section.querySelector(".viewer"), count = content.slices.length;
    viewer.replaceChildren();
    const frame = make("div", { class: "frame" }, viewer);
    const bar = make("div", { class: "slide" }, viewer);
    const back = make("button", { type: "button", "aria-label": "Previous slice" }, bar);
    const range = make("input", { type: "range", min: 0, max: count - 1, "aria-label": "Slice" }, bar);
    const on = make("button", { type: "button", "aria-label": "Next slice" }, bar);
    const told = make("output", {}, bar);
    const label = make("label", {}, bar);
    const all = make("input", { type: "checkbox", class: "all-at-once" }, label);
    label.append(" all at once");
    const sheet = make("div", { class: "sheet" }, viewer);
    back.textContent = "‹";
    on.textContent = "›";
    const middle = content.key[Math.floor(content.key.length / 2)];
    range.value = Math.max(0, content.slices.findIndex((slice) => slice.index === middle));

    function one() {
      const slice = content.slices[range.value];
      frame.replaceChildren();
      picture(content, slice, frame);
      letters(content, frame);
      let text = `Slice ${slice.index + 1} of ${content.count}`;
      if (slice.dice) text += `, slice Dice ${slice.dice.source} → ${slice.dice.adapted}`;
      told.textContent = text;
    }

    function every() {
      frame.hidden = all.checked;
      sheet.replaceChildren();
      if (!all.checked) return;
      content.slices.forEach((slice, place) => {
        const button = make("button", { type: "button" }, sheet);
        picture(content, slice, make("div", { class: "frame" }, button));
        button.append(String(slice.index + 1));
        button.addEventListener("click", () => { all.checked = false; range.value = place; every(); one(); });
      });
    }

    const step = (by) => { range.value = Number(range.value) + by; one(); };
    back.addEventListener("click", () => step(-1));
    on.addEventListener("click", () => step(1));
    range.addEventListener("input", one);
    all.addEventListener("change", every);
    one();
    section.dataset.ready = count;
  }

  function trouble(section, text) {
    const viewer = section.querySelector(".viewer");
    viewer.replaceChildren();
    make("p", { class: "trouble", role: "alert" }, viewer).textContent = text;
  }

  window.showSlices = (content) => show(document.currentScript.section, content);

  function readable(address) {
    try { return decodeURIComponent(address); } catch { return address; }
  }

  function load(section) {
    if (section.dataset.asked) return;
    section.dataset.asked = "yes";
    const name = readable(section.dataset.slices);
    const script = document.createElement("script");
    script.section = section;
    script.src = section.dataset.slices;
    script.addEventListener("error", () => {
      delete section.dataset.asked;
      trouble(section, `The slices of this case are not here: ${name} is missing beside this page. Keep the folder “slices” together with the page to see them; all else is in the page itself.`);
    });
    script.addEventListener("load", () => {
      if (!section.dataset.ready) trouble(section, `The slices of this case cannot be shown: ${name} is damaged. Run the adaptation again with --resume to make it anew.`);
    });
    document.head.append(script);
  }

  document.addEventListener("toggle", (event) => {
    if (event.target.matches("details.all") && event.target.open) load(event.target.closest("section"));
  }, true);
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#case-"]');
    const details = link && document.querySelector(`${link.getAttribute("href")} details.all`);
    if (details) details.open = true;
  });
  whole.addEventListener("change", () => {
    for (const svg of document.querySelectorAll("svg.slice")) svg.setAttribute("viewBox", whole.checked ? svg.dataset.whole : svg.dataset.crop);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const check = /^[1-4]$/.test(event.key) && document.getElementById(`layer-${LAYERS[Number(event.key) - 1]}`);
    if (check) check.click();
  });
})();
