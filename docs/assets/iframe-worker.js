// A page on disk may start no worker. Search then runs in a hidden frame that speaks as a worker does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      const base = new URL(url, location.href);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.src = new URL(address, base);
          script.onload = resolve;
          script.onerror = () => reject(new Error(`cannot load ${address}`));
          inside.document.body.appendChild(script);
        });
      inside.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve());
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.inside = inside;
      this.ready = load(base);
    }
    postMessage(data) {
      const deliver = () => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
      this.ready.then(deliver);
    }
    terminate() {}
  };
}
