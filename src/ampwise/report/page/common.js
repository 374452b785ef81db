// Of every page: find and create elements, copy a command, open what a link leads to, and mark the section in sight.

const one = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// Create an element with a text and attributes; the text is never markup.
function made(tag, text = '', attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // not allowed, or not a secure context: the old way
    const box = made('textarea', text, { readonly: '', style: 'position: fixed; opacity: 0' });
    document.body.append(box);
    box.select();
    const done = document.execCommand('copy');
    box.remove();
    return done;
  }
}

document.addEventListener('click', async (event) => {
  const button = event.target.closest('.copy');
  if (!button) return;
  const done = await copied(one('[data-copied]', button.parentElement).textContent);
  button.textContent = done ? 'copied' : 'not allowed';
  setTimeout(() => { button.textContent = 'copy'; }, 1500);
});

// A link to a folded element opens it.
function openTarget() {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let each = target; each; each = each.parentElement) if (each.tagName === 'DETAILS') each.open = true;
}

// The link of the section whose heading was passed last.
function markSection() {
  const links = all('nav a[href^="#"]');
  const passed = links.filter((link) => {
    const target = document.getElementById(link.hash.slice(1));
    return target && target.getClientRects().length && target.getBoundingClientRect().top < 120;
  });
  const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
  const current = atEnd && scrollY ? links[links.length - 1] : passed[passed.length - 1];
  for (const link of links) { if (link === current) link.setAttribute('aria-current', 'location'); else link.removeAttribute('aria-current'); }
}

let marking = 0;
addEventListener('scroll', () => { cancelAnimationFrame(marking); marking = requestAnimationFrame(markSection); }, { passive: true });
addEventListener('hashchange', openTarget);
openTarget();
if (!one('#data').textContent.trim()) document.documentElement.dataset.ready = ''; // nothing to draw
