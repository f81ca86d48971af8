"use strict";
/* The review page: a list of cases, one of them in NiiVue, and what is decided on it. */

const LAYERS = ["image", "adapted", "source", "reference", "entropy"];
const NAMES = { image: "Image", adapted: "Adapted mask", source: "Source mask", reference: "Reference", entropy: "Entropy" };
const OPACITY = { adapted: 0.45, source: 0, reference: 0, entropy: 0 };
const TINT = { source: [76, 155, 232], reference: [255, 255, 255] };
const SAID = { accept: "accepted", reject: "rejected", source: "take source", edit: "needs edit" };

const state = { cases: [], at: -1, shown: [], opacity: { ...OPACITY }, hidden: false, loading: 0 };
const one = (id) => document.getElementById(id);
const view = new niivue.Niivue({
  backColor: [0, 0, 0, 1], show3Dcrosshair: false, crosshairWidth: 0, crosshairColor: [1, 1, 1, 0.4], isColorbar: false,
  loadingText: "", isRadiologicalConvention: true, showAllOrientationMarkers: true, dragMode: niivue.DRAG_MODE.contrast,
});

function text(tag, content, name) {
  const found = document.createElement(tag);
  found.textContent = content;
  if (name) found.className = name;
  return found;
}

const percent = (value) => (value === null || value === undefined ? "n/a" : (100 * value).toFixed(1));

async function asked(path, options) {
  const answer = await fetch(path, { credentials: "same-origin", ...options });
  const told = await answer.json().catch(() => ({ error: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(told.error || `${answer.status}`);
  return told;
}

function colours(item, layer) {
  /* One colour for each class: that of the class table, or the layer's own with the class's shade. */
  const size = Math.max(...item.classes.map((entry) => entry.value)) + 1;
  const map = { R: Array(size).fill(0), G: Array(size).fill(0), B: Array(size).fill(0), A: Array(size).fill(0), I: [...Array(size).keys()], labels: Array(size).fill("") };
  item.classes.forEach((entry, index) => {
    if (entry.value === 0) return;
    const own = [1, 3, 5].map((place) => parseInt(entry.color.slice(place, place + 2), 16));
    const shade = 1 - 0.3 * ((index - 1) % 3);
    const rgb = TINT[layer] ? TINT[layer].map((value) => Math.round(value * shade)) : own;
    [map.R[entry.value], map.G[entry.value], map.B[entry.value]] = rgb;
    map.A[entry.value] = 255;
    map.labels[entry.value] = entry.name;
  });
  return map;
}

async function show(index) {
  if (index < 0 || index >= state.cases.length) return;
  const ticket = ++state.loading;
  state.at = index;
  const item = state.cases[index];
  describe();
  one("message").textContent = "";
  document.body.dataset.ready = "";
  const names = LAYERS.filter((layer) => item.layers.includes(layer));
  try {
    const volumes = names.map((layer) => ({
      url: `/api/volumes/${item.key}/${layer}.nii${layer === "image" || layer === "reference" ? "" : ".gz"}`,
      name: `${layer}.nii${layer === "image" || layer === "reference" ? "" : ".gz"}`,
      colormap: layer === "entropy" ? "hot" : "gray",
      opacity: layer === "image" ? 1 : 0,
    }));
    await view.loadVolumes(volumes);
    if (ticket !== state.loading) return;
    state.shown = names;
    names.forEach((layer, place) => {
      if (layer !== "image" && layer !== "entropy") view.volumes[place].setColormapLabel(colours(item, layer));
    });
    apply();
    jump(names.indexOf("adapted"));
    document.body.dataset.ready = String(item.key);
  } catch (error) {
    one("message").textContent = `${item.title}: ${error.message}`;
  }
}

function jump(place) {
  /* Begin at the slice that holds most of the mask, where there is one. */
  if (place < 0) return;
  const volume = view.volumes[place];
  const [, nx, ny, nz] = volume.hdr.dims;
  const counts = Array(nz).fill(0);
  for (let k = 0; k < nz; k += 1) for (let i = k * nx * ny; i < (k + 1) * nx * ny; i += 1) if (volume.img[i]) counts[k] += 1;
  const most = Math.max(...counts);
  if (most === 0) return;
  const voxel = [nx / 2, ny / 2, counts.indexOf(most)];
  view.scene.crosshairPos = view.vox2frac(voxel);
  view.drawScene();
}

function apply() {
  state.shown.forEach((layer, place) => {
    if (layer === "image") return;
    view.setOpacity(place, state.hidden ? 0 : state.opacity[layer]);
  });
}

function describe() {
  const item = state.cases[state.at];
  one("title").textContent = item.title;
  one("verdict").textContent = item.trusted ? `The ${item.used === "partial" ? "partly adapted" : item.used} mask was taken.` : "No mask is trusted here.";
  one("verdict").className = item.trusted ? "" : "warn";
  one("reason").textContent = item.reason;
  const table = one("scores");
  table.replaceChildren();
  const head = table.insertRow();
  const scored = item.scores.some((score) => score.dice !== null);
  ["Class", "Predicted Dice", ...(scored ? ["Dice", "of source"] : [])].forEach((name) => head.append(text("th", name)));
  item.scores.forEach((score) => {
    const row = table.insertRow();
    const cell = row.insertCell();
    const dot = text("i", "", "dot");
    dot.style.background = (item.classes.find((entry) => entry.value === score.label) || {}).color;
    cell.append(dot, score.name);
    const range = score.predicted_low === null ? "" : ` (${percent(score.predicted_low)} to ${percent(score.predicted_high)})`;
    row.append(text("td", percent(score.predicted_dice) + range));
    if (scored) row.append(text("td", percent(score.dice)), text("td", percent(score.dice_source)));
  });
  one("comment").value = item.comment;
  layers(item);
  decided();
}

function layers(item) {
  const box = one("layers");
  box.replaceChildren();
  LAYERS.slice(1).filter((layer) => item.layers.includes(layer)).forEach((layer) => {
    const row = document.createElement("div");
    const label = document.createElement("label");
    const check = Object.assign(document.createElement("input"), { type: "checkbox", checked: state.opacity[layer] > 0, id: `show-${layer}` });
    const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 1, step: 0.05, value: state.opacity[layer] });
    slider.setAttribute("aria-label", `Opacity of ${NAMES[layer]}`);
    check.addEventListener("change", () => { state.opacity[layer] = check.checked ? 0.45 : 0; slider.value = state.opacity[layer]; apply(); });
    slider.addEventListener("input", () => { state.opacity[layer] = Number(slider.value); check.checked = state.opacity[layer] > 0; apply(); });
    label.append(check, ` ${NAMES[layer]} `, text("kbd", String(LAYERS.indexOf(layer))));
    row.append(label, slider);
    box.append(row);
  });
}

function decided() {
  const item = state.cases[state.at];
  document.querySelectorAll("#decisions button").forEach((button) => {
    button.setAttribute("aria-pressed", String(button.dataset.decision === item.decision));
  });
  one("outcome").textContent = item.outcome_text;
  list();
}

function list() {
  const done = state.cases.filter((item) => item.decision !== null).length;
  one("progress").textContent = `${done} of ${state.cases.length} decided by ${state.reviewer}`;
  one("cases").replaceChildren(...state.cases.map((item, index) => {
    const row = document.createElement("li");
    const button = Object.assign(document.createElement("button"), { type: "button" });
    button.setAttribute("aria-current", String(index === state.at));
    button.append(text("span", item.title), text("span", percent(item.predicted_dice), item.trusted ? "" : "warn"));
    button.append(text("small", item.decision === null ? "not decided" : SAID[item.decision]));
    button.addEventListener("click", () => show(index));
    row.append(button);
    return row;
  }));
}

async function decide(decision) {
  const at = state.at;
  if (at < 0) return;
  try {
    const told = await asked("/api/decisions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ key: state.cases[at].key, decision, comment: one("comment").value,
        mask_sha256: state.cases[at].mask_sha256 }),
    });
    state.cases[at] = told;
    one("message").textContent = "";
    if (at === state.at) decided(); else list();
  } catch (error) {
    one("message").textContent = `not saved: ${error.message}`;
  }
}

document.querySelectorAll("#decisions button").forEach((button) => button.addEventListener("click", () => decide(button.dataset.decision)));
document.querySelectorAll("#planes button").forEach((button) => button.addEventListener("click", () => {
  const plane = { axial: view.sliceTypeAxial, coronal: view.sliceTypeCoronal, sagittal: view.sliceTypeSagittal, multi: view.sliceTypeMultiplanar };
  view.setCrosshairWidth(button.dataset.plane === "multi" ? 0.25 : 0);
  view.setSliceType(plane[button.dataset.plane]);
}));
document.addEventListener("keydown", (event) => {
  if (event.target.tagName === "TEXTAREA" || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = { a: "accept", r: "reject", s: "source", e: "edit" };
  if (keys[event.key]) decide(keys[event.key]);
  else if (event.key === "n") show(state.at + 1);
  else if (event.key === "p") show(state.at - 1);
  else if (event.key === "h") { state.hidden = !state.hidden; apply(); }
  else if (/^[1-4]$/.test(event.key)) { const check = one(`show-${LAYERS[Number(event.key)]}`); if (check) check.click(); }
});

(async () => {
  try {
    await view.attachToCanvas(one("view"));
    view.setSliceType(view.sliceTypeAxial);
    const told = await asked("/api/cases");
    state.cases = told.cases;
    state.reviewer = told.reviewer;
    const open = state.cases.findIndex((item) => item.decision === null);
    await show(open < 0 ? 0 : open);
  } catch (error) {
    one("message").textContent = error.message;
  }
})();
