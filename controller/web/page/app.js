// The frame of the page, and which view a path shows.

import { get, post } from "/page/api.js";
import { html, Link, useEffect, usePolled, useState } from "/page/ui.js";
import { render } from "/page/vendor/preact-htm.js";
import { HeatMapView } from "/page/views/heatmap.js";
import { IncidentView, IncidentsView } from "/page/views/incidents.js";
import { JobView } from "/page/views/job.js";
import { JobsView } from "/page/views/jobs.js";
import { LoginView } from "/page/views/login.js";
import { NodeView } from "/page/views/node.js";
import { NodesView } from "/page/views/nodes.js";
import { RanksView } from "/page/views/ranks.js";
import { SubmitView } from "/page/views/submit.js";
import { TimelineView } from "/page/views/timeline.js";

const VIEWS = [
  [/^\/(?:jobs)?$/, JobsView, "Jobs"],
  [/^\/jobs\/([^/]+)$/, JobView, "Job"],
  [/^\/jobs\/([^/]+)\/ranks$/, RanksView, "Ranks"],
  [/^\/jobs\/([^/]+)(?:\/attempts\/(?<attempt>\d+))?\/heat-map$/, HeatMapView, "Heat map"],
  [/^\/jobs\/([^/]+)(?:\/attempts\/(?<attempt>\d+))?\/timeline(?:\/(?<step>\d+))?$/, TimelineView, "Timeline"],
  [/^\/nodes$/, NodesView, "Nodes"],
  [/^\/nodes\/([^/]+)$/, NodeView, "Node"],
  [/^\/incidents$/, IncidentsView, "Incidents"],
  [/^\/incidents\/([^/]+)$/, IncidentView, "Incident"],
  [/^\/submit$/, SubmitView, "Submit"],
];
const PLACES = [["/jobs", "Jobs"], ["/nodes", "Nodes"], ["/incidents", "Incidents"], ["/submit", "Submit"]];
const THEMES = { "": "dark", dark: "light", light: "" };

function Theme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "");
  const turn = () => {
    const next = THEMES[theme];
    setTheme(next);
    if (next) {
      document.documentElement.dataset.theme = next;
      localStorage.setItem("outlast-theme", next);
    } else {
      delete document.documentElement.dataset.theme;
      localStorage.removeItem("outlast-theme");
    }
    dispatchEvent(new Event("outlast-themed"));
  };
  return html`<button class="theme" onClick=${turn}>Theme: ${theme || "system"}</button>`;
}

function Controller() {
  const about = usePolled(() => get(["about"]), [], 10);
  if (about.error) return html`<p class="banner bad" role="alert">The controller does not answer: ${about.error.message}</p>`;
  if (!about.value?.read_only) return null;
  return html`<p class="banner warn" role="alert">The controller is read-only: ${about.value.read_only}</p>`;
}

/** Who asks, where the controller wants to know. */
function Caller() {
  const me = usePolled(() => get(["whoami"]), [], 60);
  if (!me.value?.asked) return null;
  const leave = async () => {
    await post(["logout"]);
    dispatchEvent(new Event("outlast-asked-for-token"));
  };
  return html`<span class="caller">${me.value.name} (${me.value.role})
    <button class="theme" onClick=${leave}>Log out</button></span>`;
}

/** What shows a path, with the name in it; undefined where nothing does. */
function viewOf(path) {
  for (const [pattern, view, title] of VIEWS) {
    const match = path.match(pattern);
    if (!match) continue;
    try {
      return { view, title, name: match[1] && decodeURIComponent(match[1]), groups: match.groups ?? {} };
    } catch {
      // What is escaped in it is no text.
      return undefined;
    }
  }
  return undefined;
}

function App() {
  const [path, setPath] = useState(location.pathname);
  const [isAsked, setAsked] = useState(false);
  useEffect(() => {
    const asked = () => setAsked(true);
    addEventListener("outlast-asked-for-token", asked);
    return () => removeEventListener("outlast-asked-for-token", asked);
  }, []);
  useEffect(() => {
    const moved = () => {
      setPath(location.pathname);
      scrollTo(0, 0);
    };
    addEventListener("popstate", moved);
    addEventListener("outlast-navigated", moved);
    return () => {
      removeEventListener("popstate", moved);
      removeEventListener("outlast-navigated", moved);
    };
  }, []);
  const found = viewOf(path);
  useEffect(() => {
    document.title = `${isAsked ? "Log in" : found?.name ?? found?.title ?? "Not found"} · Outlast`;
  }, [path, isAsked]);
  if (isAsked) return html`<main id="main"><${LoginView} onDone=${() => setAsked(false)} /></main>`;
  return html`<a class="skip" href="#main">To the content</a>
    <header class="top">
      <${Link} to="/jobs" class="brand"><img src="/page/icon.svg" alt="" width="24" height="24" />Outlast<//>
      <nav aria-label="Pages">
        ${PLACES.map(
          ([to, title]) => html`<${Link}
            to=${to}
            aria-current=${path === to || (to !== "/submit" && path.startsWith(`${to}/`)) || (to === "/jobs" && path === "/") ? "page" : undefined}
          >${title}<//>`,
        )}
      </nav>
      <${Caller} />
      <${Theme} />
    </header>
    <${Controller} />
    <main id="main" tabindex="-1">
      ${found
        ? html`<${found.view} key=${path} name=${found.name} ...${found.groups} />`
        : html`<h1>Not found</h1><p>There is no page ${path}.</p>`}
    </main>`;
}

// The system's theme, where the reader has chosen none.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("outlast-themed")));
render(html`<${App} />`, document.getElementById("app"));
