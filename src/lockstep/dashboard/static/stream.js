// Requests to the server. The token is that of the page's address; it is sent with each request, and kept nowhere.

const TOKEN = new URLSearchParams(location.search).get("token") ?? "";

export function address(path, values = []) {
  const query = new URLSearchParams([...values, ["token", TOKEN]]);
  return `${path}?${query}`;
}

// The page at another run: the token stays.
export function pageOf(values) {
  return address(location.pathname, values);
}

export async function getJson(path, values) {
  const answer = await fetch(address(path, values));
  if (!answer.ok) throw new Error((await answer.text()).trim(), { cause: answer.status });
  return answer.json();
}

// Follows runs by server-sent events, and connects again when the server comes back. While the page is hidden it does not follow:
// browsers allow six connections to a server, and each page has one.
export class Stream {
  constructor(names, view, onMessage, onState) {
    Object.assign(this, { onMessage, onState, source: null, timer: null });
    this.address = address("api/stream", [...names.map((name) => ["run", name]), ["view", view]]);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
    addEventListener("pagehide", () => this.stop());
    this.start();
  }

  start() {
    if (this.source) return;
    clearTimeout(this.timer);
    const source = new EventSource(this.address);
    this.source = source;
    source.onmessage = (event) => {
      this.onState("");
      this.onMessage(JSON.parse(event.data));
    };
    source.onerror = () => this.onError(source);
  }

  stop() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  onError(source) {
    if (source !== this.source) return;
    this.stop();
    this.ask();
  }

  // Asks until the server would send the stream again, and says why it does not.
  async ask() {
    const text = await refusal(this.address);
    if (this.source || document.hidden) return;
    this.onState(text);
    this.timer = setTimeout(() => (text ? this.ask() : this.start()), text ? 1000 : 100);
  }
}

async function refusal(stream) {
  const abort = new AbortController();
  try {
    const answer = await fetch(stream, { signal: abort.signal });
    if (answer.ok) return "";
    if (answer.status === 403) return "The server was started again with another token. Open the address that it has printed.";
    return (await answer.text()).trim();
  } catch {
    return "The server does not answer. This page connects again when it does.";
  } finally {
    abort.abort();
  }
}
