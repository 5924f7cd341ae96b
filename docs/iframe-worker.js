/* Search without a server: browsers refuse a Worker to a page of file://, so its script runs in a hidden frame. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = Object.assign(document.createElement("iframe"), { hidden: true, title: "search" });
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = Object.assign(inner.document.createElement("script"), { src: url });
      const loaded = new Promise((done) => script.addEventListener("load", done));
      this.postMessage = async (data) => {
        await loaded;
        inner.dispatchEvent(new inner.MessageEvent("message", { data: structuredClone(data) }));
      };
      inner.document.body.append(script);
    }
  };
  window.Worker = window.IFrameWorker;
}
