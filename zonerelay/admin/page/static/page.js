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
  const rows = new Map();
  // A message has one row, which moves up with each event of it.
  const show = (event) => {
    const known = event.message && rows.get(event.message);
    const row = known || document.getElementById("row").content.cloneNode(true).firstElementChild;
    const [time, message, names, what] = row.cells;
    time.firstElementChild.textContent = event.at;
    what.firstElementChild.textContent = event.what;
    if (event.message && !known) {
      rows.set(event.message, row);
      const link = document.createElement("a");
      link.href = `/message/${event.message}`;
      link.textContent = event.message;
      message.append(link);
    }
    let mark = names.lastElementChild;
    if (mark?.dataset.name === event.name) {
      mark.dataset.count = Number(mark.dataset.count) + 1;
      mark.textContent = `${event.name} ×${mark.dataset.count}`;
    } else {
      mark = document.createElement("span");
      mark.className = `state ${event.name}`;
      Object.assign(mark.dataset, { name: event.name, count: 1 });
      mark.textContent = event.name;
      names.append(mark, " ");
    }
    events.prepend(row);
    while (events.rows.length > most) {
      rows.delete(events.lastElementChild.cells[1].textContent);
      events.lastElementChild.remove();
    }
  };
  const say = (text) => { if (state.textContent !== text) state.textContent = text; };
  const source = new EventSource(events.dataset.from);
  source.onopen = () => say("Following. Events come as they happen.");
  source.onerror = () => say(source.readyState === EventSource.CLOSED ? "The stream has ended: load the page again." : "The connection broke; trying again.");
  source.onmessage = (event) => {
    const told = JSON.parse(event.data);
    if (pause.getAttribute("aria-pressed") === "true") {
      waiting.push(told);
      waiting = waiting.slice(-most);
      say(`Paused; ${waiting.length} events wait.`);
    } else show(told);
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
