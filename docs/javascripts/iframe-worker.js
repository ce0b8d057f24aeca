// Browsers start no workers for pages opened from disk (file://), so the site's search runs in a hidden frame there.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inner = this.frame.contentWindow
      inner.document.open()
      inner.document.write("<!doctype html><html><body></body></html>")
      inner.document.close()
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      inner.importScripts = (...urls) => Promise.all(urls.map(source => this.load(source)))
      this.load(url).then(() => {
        this.ready = true
        this.waiting.splice(0).forEach(data => this.postMessage(data))
      })
    }
    load(url) {
      const script = this.frame.contentDocument.createElement("script")
      script.src = url
      this.frame.contentDocument.body.appendChild(script)
      return new Promise(resolve => script.addEventListener("load", resolve))
    }
    postMessage(data) {
      const inner = this.frame.contentWindow
      if (this.ready) inner.dispatchEvent(new inner.MessageEvent("message", {data}))
      else this.waiting.push(data)
    }
    terminate() {
      this.frame.remove()
    }
  }
}
