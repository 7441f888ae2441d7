// Values of charts and drafts by pointer, touch and arrow keys; without this script the page has only lines and tables.
"use strict";

function made(tag, properties) {
  return Object.assign(document.createElement(tag), properties);
}

// A line's point whose place is closest to the given one.
function closest(points, place) {
  return points.reduce((best, point) => (Math.abs(point[1] - place) < Math.abs(best[1] - place) ? point : best));
}

// A slider below the chart walks over its steps: native, so that arrow keys, touch and screen readers work.
function readOut(figure) {
  const lines = JSON.parse(figure.querySelector("script").textContent);
  const all = new Map(lines.flatMap((line) => line.points.map(([step, place]) => [step, place])));
  const steps = [...all].sort((one, other) => one[0] - other[0]);
  const plot = figure.querySelector(".plot");
  const cursor = plot.querySelector(".cursor");
  const title = figure.querySelector("figcaption").firstChild.textContent.trim();
  const slider = made("input", { type: "range", className: "slider", min: 0, max: steps.length - 1, value: 0 });
  const values = made("output", { className: "values", textContent: "Move over the chart or the slider for values." });
  plot.after(slider, values);
  slider.setAttribute("aria-label", `${title}: training step`);
  values.setAttribute("aria-live", "off"); // the slider announces the same values

  function show() {
    const [step, place] = steps[slider.value];
    const shown = lines.map((line) => [line, closest(line.points, place)]);
    const texts = shown.map(([line, [at, , value]]) => `${line.name} ${value}` + (at === step ? "" : ` (step ${at})`));
    const items = texts.map((text, number) => {
      const item = made("span", { textContent: text });
      item.prepend(made("span", { className: `swatch ${lines[number].style}` }));
      return item;
    });
    values.replaceChildren(made("span", { textContent: `step ${step}` }), ...items);
    slider.setAttribute("aria-valuetext", `step ${step}: ${texts.join(", ")}`);
    cursor.hidden = false;
    const area = plot.querySelector(".x");
    cursor.style.left = `${area.offsetLeft + place * area.offsetWidth}px`;
  }

  function point(event) {
    const area = plot.querySelector(".x").getBoundingClientRect();
    const place = (event.clientX - area.left) / area.width;
    slider.value = steps.indexOf(closest(steps, place));
    show();
  }

  slider.addEventListener("input", show);
  slider.addEventListener("focus", show);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointermove", point);
  window.addEventListener("resize", () => cursor.hidden || show());
}

// A click, a touch or the arrow keys choose a token of a text; a line below describes it.
function walk(group) {
  const tokens = [...group.querySelectorAll("[title]")];
  const shown = made("output", { className: "values" });
  group.after(shown);
  let chosen = -1;

  function choose(number) {
    if (!tokens.length) return;
    tokens[chosen]?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(tokens.length - 1, number));
    tokens[chosen].classList.add("chosen");
    shown.textContent = `${tokens[chosen].textContent.trim()} - ${tokens[chosen].title}`;
  }

  group.addEventListener("click", (event) => {
    const number = tokens.indexOf(event.target);
    if (number >= 0) choose(number);
  });
  group.addEventListener("keydown", (event) => {
    const ends = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: tokens.length - 1 };
    if (event.key in ends) {
      choose(ends[event.key]);
      event.preventDefault();
    }
  });
}

document.querySelectorAll("figure.chart").forEach(readOut);
document.querySelectorAll(".tokens").forEach(walk);
