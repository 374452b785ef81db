// The page as a whole: its data, its colours, its links, and news of a run that goes on.

const shown = { data: null };

function show(data) {
  shown.data = data;
  const drawn = data.curves.some((line) => line.first.length);
  one('#curves').hidden = !drawn;
  if (drawn) drawCharts(data.curves);
  if (!one('#gradients')) return;
  one('#gradients').hidden = !data.layers.length;
  setLayers(data);
  setHeat(data);
}

// Colours are read from the styles when something is drawn: when they change, all is drawn again.
function redraw() {
  if (shown.data) show(shown.data);
}

function followColours() {
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  addEventListener('beforeprint', () => { document.documentElement.dataset.paper = ''; all('details').forEach((each) => { each.dataset.was = each.open; each.open = true; }); redraw(); });
  addEventListener('afterprint', () => { delete document.documentElement.dataset.paper; all('details').forEach((each) => { each.open = each.dataset.was === 'true'; }); redraw(); });
}

// A link to something that is folded up opens it.
function openTarget() {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let each = target; each; each = each.parentElement) if (each.tagName === 'DETAILS') each.open = true;
}

function takeIn(news) {
  document.title = news.title;
  for (const [name, markup] of Object.entries(news.parts)) {
    const part = one(`[data-part="${name}"]`);
    if (!part || part.dataset.markup === markup) continue;
    const open = all('details[open]', part).map((each) => each.id || one('summary', each).textContent);
    part.innerHTML = markup; // escaped by the server, as the page itself was
    part.dataset.markup = markup;
    for (const each of all('details', part)) if (open.includes(each.id || one('summary', each).textContent)) each.open = true;
  }
  show(news.data);
}

const EVERY = 2000; // milliseconds
async function follow() {
  const told = one('#live');
  let version = '';
  for (;;) {
    await new Promise((done) => setTimeout(done, EVERY));
    if (document.hidden) continue;
    try {
      const answer = await fetch('update', { headers: version ? { 'If-None-Match': version } : {}, cache: 'no-store' });
      if (answer.status === 200) {
        version = answer.headers.get('ETag') || '';
        takeIn(await answer.json());
      }
      told.textContent = `This page follows the run; last asked at ${new Date().toLocaleTimeString()}.`;
    } catch {
      told.textContent = 'The server no longer answers: this is the last that was seen.';
    }
  }
}

function start() {
  startCharts();
  if (one('#gradients')) { startHeat(); startLayers(); }
  followColours();
  addEventListener('hashchange', openTarget);
  openTarget();
  unpacked(one('#data').textContent).then((data) => {
    show(data);
    document.documentElement.dataset.ready = '';
    if ('live' in document.documentElement.dataset) follow();
  });
}

start();
