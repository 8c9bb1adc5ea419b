// A browser starts no worker for a page that was opened as a file. Search then runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.receive(data);
      const script = this.frame.contentDocument.createElement("script");
      script.src = new URL(url, location.href);
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        for (const data of waiting) this.postMessage(data);
      };
      this.frame.contentDocument.body.append(script);
    }
    receive(data) {
      setTimeout(() => this.onmessage?.(new MessageEvent("message", { data })));
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else setTimeout(() => this.frame.contentWindow?.onmessage(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
