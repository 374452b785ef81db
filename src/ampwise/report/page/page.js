// The page as a whole: its data, colours and links, and updates of a live run.

const shown = { data: null };

function show(data) {
  shown.data = data;
  const drawn = data.curves.some((line) => line.first.length);
  one('#curves').hidden = !drawn;
  if (drawn) drawCharts(data.curves, data.titles);
  if (!one('#gradients')) return;
  one('#gradients').hidden = !data.layers.length;
  setLayers(data);
  setHeat(data);
}

// Colours are read from the styles when something is drawn: when they change, everything is redrawn.
function redraw() {
  if (shown.data) show(shown.data);
}

function followColours() {
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  addEventListener('beforeprint', () => { document.documentElement.dataset.paper = ''; folded().forEach((each) => { each.dataset.was = each.open; each.open = true; }); redraw(); });
  addEventListener('afterprint', () => { delete document.documentElement.dataset.paper; folded().forEach((each) => { each.open = each.dataset.was === 'true'; }); redraw(); });
}

// What is unfolded for printing: not the same lines of code a second time.
const folded = () => all('details:not(.repeated)');

// A link to a folded element opens it.
function openTarget() {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let each = target; each; each = each.parentElement) if (each.tagName === 'DETAILS') each.open = true;
}

// --- Live updates.

const seen = new Map(); // the last markup of each part

function takeIn(news) {
  document.title = news.title;
  for (const [name, markup] of Object.entries(news.parts)) {
    const part = one(`[data-part="${name}"]`);
    if (part && seen.get(name) !== markup) replacePart(part, markup);
    seen.set(name, markup);
  }
  show(news.data);
}

function replacePart(part, markup) {
  const open = all('details[open]', part).map((each) => each.id);
  const focused = part.contains(document.activeElement) && document.activeElement.closest('[id]')?.id;
  part.innerHTML = markup; // escaped by the server, as the page itself was
  for (const id of open) { const each = document.getElementById(id); if (each) each.open = true; }
  const again = focused && document.getElementById(focused);
  if (again) (again.matches('a, summary, pre, [tabindex]') ? again : one('a, summary, pre', again))?.focus({ preventScroll: true });
}

// No update while the user drags or has selected text.
let held = false;
const isBusy = () => held || document.hidden || !getSelection().isCollapsed;

const WORDS = {
  following: 'This page follows the run.',
  other: 'The server was restarted: open the address that it printed. This is the last state received.',
  gone: 'The server no longer responds: this is the last state received.',
};

function tellState(state) {
  const status = one('#live');
  if (status.dataset.state !== state) status.textContent = WORDS[status.dataset.state = state];
}

async function ask(version) {
  try {
    return await fetch('update', { headers: version ? { 'If-None-Match': version } : {}, cache: 'no-store' });
  } catch {
    return null;
  }
}

async function follow(seconds) {
  addEventListener('pointerdown', () => { held = true; });
  for (const event of ['pointerup', 'pointercancel', 'blur']) addEventListener(event, () => { held = false; });
  for (let version = ''; ;) {
    await new Promise((done) => setTimeout(done, seconds * 1000));
    if (isBusy()) continue;
    const answer = await ask(version);
    tellState(answer === null ? 'gone' : answer.ok || answer.status === 304 ? 'following' : 'other');
    if (!answer?.ok) continue;
    const news = await answer.json();
    if (isBusy()) continue; // it may have become busy since
    version = answer.headers.get('ETag') || '';
    takeIn(news);
  }
}

function start() {
  startCharts();
  if (one('#gradients')) { startHeat(); startLayers(); }
  followColours();
  addEventListener('hashchange', openTarget);
  openTarget();
  const { live } = document.documentElement.dataset;
  unpacked(one('#data').textContent).then((data) => {
    one('#no-charts').remove();
    show(data);
    document.documentElement.dataset.ready = '';
    if (live) follow(Number(live));
  });
}

start();
