// Data files are scripts that call headrace.load(NAME, VALUE): a page that was opened as a file may not read others.

declare global {
  interface Window {
    headrace: { load(name: string, value: unknown): void };
  }
}

const MOST_STEPS = 8; // files of steps, evaluations and tokens that stay in memory
const TIMEOUT_MILLISECONDS = 120_000; // a live page may wait for a large file
const cache = new Map<string, unknown>(); // the most recently used last
const received = new Map<string, unknown>();
const pending = new Map<string, Promise<unknown>>();

window.headrace = { load: (name, value) => void received.set(name, value) };

/** The value of data/NAME.js. Rejects with a sentence that names the file. */
export function load<T>(name: string, fresh = false): Promise<T> {
  if (!fresh && cache.has(name)) {
    keep(name, cache.get(name));
    return Promise.resolve(cache.get(name) as T);
  }
  const earlier = pending.get(name);
  if (earlier) return earlier as Promise<T>;
  const request = byScript(name, fresh).finally(() => pending.delete(name));
  pending.set(name, request);
  return request as Promise<T>;
}

/** The value where it is in memory already. */
export function loaded<T>(name: string): T | undefined {
  return cache.get(name) as T | undefined;
}

export function forget(name: string): void {
  cache.delete(name);
}

async function byScript(name: string, fresh: boolean): Promise<unknown> {
  const script = document.createElement("script");
  const end = new Promise<string>((resolve) => {
    script.onload = () => resolve("is damaged. Run headrace view again.");
    script.onerror = () => resolve("cannot be loaded. Copy the whole folder, or run headrace view again.");
    setTimeout(() => resolve("did not arrive within two minutes. Reload the page."), TIMEOUT_MILLISECONDS);
  });
  script.src = `data/${name}.js${fresh ? `?t=${Date.now()}` : ""}`;
  document.head.append(script);
  const fault = await end;
  script.remove();
  if (!received.has(name)) throw new Error(`data/${name}.js ${fault}`);
  const value = received.get(name);
  received.delete(name);
  keep(name, value);
  return value;
}

function keep(name: string, value: unknown): void {
  cache.delete(name);
  cache.set(name, value);
  const numbered = [...cache.keys()].filter((each) => /-\d+$/.test(each));
  for (const old of numbered.slice(0, -MOST_STEPS)) cache.delete(old);
}
