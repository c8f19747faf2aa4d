// Search runs in a worker, which a page opened from a folder may not start. This runs the worker's script in a hidden frame instead.
// The frame's document is written by the page, which gives it the page's address: an empty frame may not load files.
window.IFrameWorker = window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.body.appendChild(document.createElement("iframe"));
    frame.hidden = true;
    const inner = frame.contentWindow, page = frame.contentDocument;
    page.open();
    page.write("<!doctype html><title>worker</title>");
    page.close();
    const base = new URL(url, document.baseURI);
    const load = (address) => new Promise((resolve, reject) => {
      const script = page.createElement("script");
      Object.assign(script, { src: new URL(address, base).href, onload: resolve, onerror: reject });
      page.head.appendChild(script);
    });
    inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    inner.importScripts = (...addresses) => Promise.all(addresses.map(load));
    this.inner = inner;
    this.ready = load(base);
  }
  postMessage(data) {
    this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
  }
};
