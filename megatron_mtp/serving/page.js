// A prompt to /v1/completions; its events to letters, of which those of accepted drafts are coloured, and to figures.
"use strict";

const form = document.querySelector("form");
const [start, stop] = form.querySelectorAll("button");
const output = document.querySelector(".tokens");
const problem = document.querySelector(".error");
const figures = document.querySelector("#figures");
const positions = document.querySelector("#positions");
let going = null;

function made(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Sums over a text's steps.
class Counts {
  offered = [];
  accepted = [];
  tokens = 0;
  steps = 0;
  began = null;

  add(draft) {
    this.began ??= performance.now();
    this.tokens += draft.pieces.length;
    this.steps += 1;
    for (let place = 0; place < draft.offered; place++) {
      this.offered[place] = (this.offered[place] ?? 0) + 1;
      this.accepted[place] = (this.accepted[place] ?? 0) + (place < draft.accepted ? 1 : 0);
    }
  }

  show() {
    const seconds = (performance.now() - this.began) / 1000;
    const rate = seconds > 0.05 ? (this.tokens / seconds).toFixed(1) : "-";
    const perStep = (this.tokens / this.steps).toFixed(2);
    figures.textContent = `${this.tokens} tokens, ${rate} tokens a second, ${perStep} tokens a step`;
    positions.replaceChildren(...this.offered.map((count, place) => this.row(place, count)));
  }

  row(place, count) {
    const share = this.accepted[place] / count;
    const meter = made("meter", { min: 0, max: 1, value: share });
    meter.setAttribute("aria-label", `acceptance at position ${place + 1}`);
    const cells = [`${(100 * share).toFixed(1)} %`, `${this.accepted[place]} of ${count}`];
    const name = made("th", { scope: "row", textContent: place + 1 });
    return made("tr", {}, name, ...cells.map((textContent) => made("td", { textContent })), made("td", {}, meter));
  }
}

function show(choice, counts) {
  for (const draft of choice.drafts) {
    const pieces = draft.pieces.map((textContent, place) =>
      made("span", { textContent, className: place < draft.accepted ? "accepted" : "" }),
    );
    output.append(...pieces);
    if (draft.pieces.length) counts.add(draft);
  }
  const missing = choice.text.slice(choice.drafts.flatMap((draft) => draft.pieces).join("").length);
  if (missing) output.append(missing);
  if (counts.steps) counts.show();
}

// The objects of a stream of server-sent events.
async function* events(response) {
  let rest = "";
  for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + part).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line !== "data: [DONE]") yield JSON.parse(line.slice("data: ".length));
  }
}

async function generate() {
  const given = new FormData(form);
  const headers = { "Content-Type": "application/json" };
  if (given.get("key")) headers.Authorization = `Bearer ${given.get("key")}`;
  const body = JSON.stringify({
    prompt: given.get("prompt"),
    max_tokens: Number(given.get("max_tokens")),
    temperature: Number(given.get("temperature")),
    stream: true,
    return_drafts: true,
  });
  output.replaceChildren(made("span", { className: "prompt", textContent: given.get("prompt") }));
  const counts = new Counts();
  const response = await fetch("/v1/completions", { method: "POST", headers, body, signal: going.signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    event.choices.forEach((choice) => show(choice, counts));
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (going) return;
  going = new AbortController();
  problem.textContent = "";
  [start.disabled, stop.disabled] = [true, false];
  output.setAttribute("aria-busy", "true");
  try {
    await generate();
  } catch (error) {
    if (error.name !== "AbortError") problem.textContent = error.message;
  } finally {
    going = null;
    [start.disabled, stop.disabled] = [false, true];
    output.setAttribute("aria-busy", "false");
  }
});
stop.addEventListener("click", () => going?.abort());
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  if (event.key === "Escape") going?.abort();
});
