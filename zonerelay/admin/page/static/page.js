// What plain HTML cannot do: refresh politely, follow the live tail. Everything else works without it.
"use strict";

// A page that refreshes itself leaves a reader who is in it, and a hidden window, alone.
document.addEventListener("htmx:beforeRequest", (event) => {
  const part = event.target;
  if (part.id === "live" && (document.hidden || part.contains(document.activeElement))) event.preventDefault();
});

// What is shown is old when the relay does not answer.
const noAnswer = () => {
  if (document.getElementById("old")) return;
  const note = document.createElement("p");
  note.id = "old";
  note.className = "trouble";
  note.setAttribute("role", "alert");
  note.textContent = "The relay does not answer: what is shown is old.";
  document.getElementById("main").prepend(note);
};
document.addEventListener("htmx:sendError", noAnswer);
document.addEventListener("htmx:responseError", noAnswer);
document.addEventListener("htmx:afterSwap", () => document.getElementById("old")?.remove());

const events = document.getElementById("events");
if (events && events.dataset.from) {
  const most = 500;
  const state = document.getElementById("tail-state");
  const pause = document.getElementById("pause");
  let waiting = [];
  const show = (cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const place = document.createElement("td");
      if (cell.link) {
        const link = document.createElement("a");
        link.href = cell.link;
        link.className = "id";
        link.textContent = cell.text;
        place.append(link);
      } else {
        const text = document.createElement("bdi");
        text.textContent = cell.text;
        place.append(text);
      }
      place.className = cell.kind || "";
      row.append(place);
    }
    events.prepend(row);
    while (events.rows.length > most) events.lastElementChild.remove();
  };
  const say = (text) => { if (state.textContent !== text) state.textContent = text; };
  const source = new EventSource(events.dataset.from);
  source.onopen = () => say("Following. Events come as they happen.");
  source.onerror = () => say(source.readyState === EventSource.CLOSED ? "The stream has ended: load the page again." : "The connection broke; trying again.");
  source.onmessage = (event) => {
    const cells = JSON.parse(event.data);
    if (pause.getAttribute("aria-pressed") === "true") {
      waiting.push(cells);
      waiting = waiting.slice(-most);
      say(`Paused; ${waiting.length} events wait.`);
    } else show(cells);
  };
  pause.hidden = false;
  pause.addEventListener("click", () => {
    const paused = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", String(paused));
    if (paused) return say("Paused; 0 events wait.");
    waiting.forEach(show);
    waiting = [];
    say("Following. Events come as they happen.");
  });
  addEventListener("pagehide", () => source.close());
}

// `zonerelay sandbox` prints an address with its token behind the #, which no server sees.
if (location.hash.startsWith("#zrt_")) {
  const given = location.hash.slice(1);
  history.replaceState(null, "", location.pathname + location.search);
  const token = document.getElementById("token");
  if (token) {
    token.value = given;
    token.form.requestSubmit();
  }
}
