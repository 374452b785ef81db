// The page as a whole: its data, colours and links, and updates of a live run.

const shown = { data: null };

function show(data) {
  shown.data = data;
  const drawn = data.curves.some((line) => line.first.length);
  one('#curves').hidden = !drawn;
  if (drawn) drawCharts(data.curves, data.titles, data.markers);
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

// The mark: live or ended, as the record says; or lost, if the server does not answer. And since when nothing is new.
const LOST = {
  other: 'The server was restarted: open the address that it printed. This is the last state received.',
  gone: 'The server no longer responds: this is the last state received.',
};
const live = { state: null, lost: '', since: Date.now() };

function showMark() {
  const mark = one('#mark'), { name, words } = live.lost ? { name: 'lost', words: LOST[live.lost] } : live.state || { name: mark.className, words: mark.textContent };
  if (mark.textContent !== words) mark.textContent = words; // a screen reader says it again
  mark.className = name;
  const seconds = Math.floor((Date.now() - live.since) / 1000);
  const ago = seconds < 60 ? `${seconds} s` : seconds < 3600 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
  one('#ago').textContent = name === 'ended' ? '' : `updated ${ago} ago`;
}

async function ask(version) {
  try {
    return await fetch('update', { headers: version ? { 'If-None-Match': version } : {}, cache: 'no-store' });
  } catch {
    return null;
  }
}

async function follow(seconds) {
  setInterval(showMark, 1000);
  showMark();
  addEventListener('pointerdown', () => { held = true; });
  for (const event of ['pointerup', 'pointercancel', 'blur']) addEventListener(event, () => { held = false; });
  for (let version = ''; ;) {
    await new Promise((done) => setTimeout(done, seconds * 1000));
    if (isBusy()) continue;
    const answer = await ask(version);
    live.lost = answer === null ? 'gone' : answer.ok || answer.status === 304 ? '' : 'other';
    showMark();
    if (!answer?.ok) continue;
    const news = await answer.json();
    if (isBusy()) continue; // it may have become busy since
    if (live.state) live.since = Date.now(); // the first update repeats the page
    live.state = news.state;
    showMark();
    version = answer.headers.get('ETag') || '';
    takeIn(news);
  }
}

function start() {
  startCharts();
  if (one('#gradients')) { startHeat(); startLayers(); }
  followColours();
  const every = document.documentElement.dataset.live;
  unpacked(one('#data').textContent).then((data) => {
    one('#no-charts').remove();
    show(data);
    document.documentElement.dataset.ready = '';
    markSection();
    if (every) follow(Number(every));
  });
}

start();
